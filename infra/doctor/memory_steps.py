"""The process whose memory on the GPU :mod:`infra.doctor.memory` measures, with a step for each line on stdin."""

import json
import sys

import torch
import torch.nn.functional as F


def main() -> None:
    """Create a context, then run kernels; print the bytes that torch's allocator has reserved after each."""
    device = torch.device("cuda")
    for step, _ in zip((create_context, run_kernels), sys.stdin, strict=False):
        step(device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        print(json.dumps({"reserved": torch.cuda.memory_reserved(device)}), flush=True)
    sys.stdin.read()  # The context stays until it has been measured.


def create_context(device: torch.device) -> None:
    """Create the context of this process, by an allocation that is freed again."""
    torch.zeros(1, device=device)


def run_kernels(device: torch.device) -> None:
    """Run the kernels of a training step on small inputs: products, attention, norm, loss and AdamW, and gradients."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    layer = torch.nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.randn(2, 64, 64, device=device)
    with torch.autocast("cuda", dtype):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(64, device=device)
        hidden = layer(x, src_mask=mask, is_causal=True)
        loss = F.cross_entropy(hidden.flatten(0, 1).float(), torch.zeros(128, dtype=torch.int64, device=device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    main()
