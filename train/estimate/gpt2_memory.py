"""Predicted peak memory of a GPT-2 by formulas.

- Eager execution: the formulas add up the tensors that autograd saves, operation by operation, like Korthikanti et al.
  (arXiv 2205.05198, section 4). They agree with torch's memory tracker.
- Compiled execution saves as much of a block, because torch's partitioner recomputes element-wise operations, but not
  the inputs of matrix products in the backward pass, such as the outputs of norms and GELU
  (``ban_recompute_materialized_backward``; ``is_materialized_backwards`` in torch/_functorch/partitioners.py). It needs
  less memory in the loss, where Inductor writes the gradient of the logits over them.
- The order in which Inductor computes gradients determines which of them are in memory together. It was read from the
  allocator's record of each step (``torch.profiler`` with ``profile_memory``, torch 2.13, CPU).

Both agree with the resident memory of a process on the CPU (tests/benchmarks/memory.py).
"""

from dataclasses import dataclass

from train.config import (
    ACTIVATION_BUDGETS,
    EAGER_BACKENDS,
    HALF_PRECISIONS,
    WHOLE_GRAPH,
    Attention,
    Batch,
    Execution,
    Optimizer,
    Precision,
)
from train.estimate.breakdown import CONTEXT, MemoryBreakdown
from train.model_config import ModelConfig
from train.models.loss import chunk_count

WORKSPACE = {"cuda": 32 * 2**20, "cpu": 0}
"""Bytes of cuBLAS's workspaces. By torch's default there are two, of 8 MiB each, and of 32 MiB on Hopper."""
DETERMINISTIC_WORKSPACE = 64 * 2**20
"""Bytes of cuBLAS's workspaces with ``--deterministic``: two, each of eight buffers of 4 MiB."""
LOSS = "the loss's backward pass"
"""The moment when the logits are in memory."""


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes in memory per token."""

    block: float
    """Activations of one block that its backward pass needs."""
    saved: float
    """Activations of one block that are saved until its backward pass; less than ``block`` with checkpointing."""
    working: float
    """Temporary gradients during a block's backward pass, minus the memory that it has freed by then."""
    head_inputs: float
    """The final norm's input, the head's input with its gradient in the fused loss, and the token ids."""
    loss: float
    """Logits and intermediate results of the loss, for a token in the current chunk."""


def predict_breakdown(model: ModelConfig, batch: Batch, execution: Execution, optimizer: Optimizer) -> MemoryBreakdown:
    """Return the peak of a step on one worker by part."""
    kind, offloads = execution.device, execution.offload_optimizer
    moments = _moments(model, batch, execution, optimizer)
    moment = max(moments, key=lambda name: sum(moments[name]))
    gradients, casts, activations, logits, working = (round(size) for size in moments[moment])
    # In eager execution the freed logits in 16 bits and their fp32 copy are as large as one and a half fp32 copies. The
    # gradient of the log-softmax takes one of them, and the gradient of the logits does not fit into the other half.
    has_logits = not _loss_chunks(model.context_length, batch.micro_batch, execution)
    eager = _is_eager(execution) and _half(execution.precision) and has_logits
    hole = kind == "cuda" and eager and moment == LOSS
    parameters, shards = model.parameters, _shards(batch.workers, execution.fsdp)
    return MemoryBreakdown(
        weights=_weight_bytes(optimizer) * parameters // shards,
        gradients=gradients,
        optimizer=0 if offloads else optimizer_bytes(model, optimizer, parameters) // shards,
        casts=casts,
        activations=activations,
        logits=logits,
        working=working,
        workspace=DETERMINISTIC_WORKSPACE if kind == "cuda" and execution.deterministic else WORKSPACE[kind],
        unused=2 * batch.micro_batch * model.context_length * model.padded_vocab_size if hole else 0,
        context=CONTEXT[kind],
        moment=moment,
    )


def _moments(
    model: ModelConfig, batch: Batch, execution: Execution, optimizer: Optimizer
) -> dict[str, tuple[float, float, float, float, float]]:
    """Return the bytes of (gradients, casts, activations, logits, working results) at each moment that can be the
    peak."""
    layers = model.layers
    head_parameters = model.padded_vocab_size * model.width
    tokens = batch.micro_batch * model.context_length
    chunks = _loss_chunks(model.context_length, batch.micro_batch, execution)
    sizes = token_sizes(model, batch.micro_batch, execution, execution.device)
    weight_bytes, shards = _weight_bytes(optimizer), _shards(batch.workers, execution.fsdp)
    all_gradients = weight_bytes * model.parameters // shards
    cast = 2 if _half(execution.precision) and weight_bytes == 4 else 0
    # With full checkpointing each block makes autocast's copies and the mask again, and frees them at its end.
    remakes_mask = execution.checkpointing == "full"
    block_casts = cast * (model.matmul_parameters - head_parameters)
    if execution.compile == "blocks" and execution.device == "cuda":  # A block's last weight is cast again.
        block_casts = block_casts * 2 // 3
    casts = block_casts * (layers - model.recomputed_blocks(execution.checkpointing)) // layers
    mask = model.context_length**2 * _materializes(model, execution.attention, execution.device)
    accumulated = all_gradients if batch.accumulation > 1 else 0
    whole, alone = execution.compile in WHOLE_GRAPH, execution.compile == "blocks"
    # The whole graph keeps the position embeddings to compute the sum of both embeddings again.
    positions = 4 * model.context_length * model.width * whole
    saved = positions + layers * (tokens * sizes.saved + (0 if remakes_mask else mask))
    recomputed = tokens * (sizes.block - sizes.saved) + (mask if remakes_mask else 0)
    if execution.checkpointing == "alternate":  # The last block is only recomputed if the number of blocks is odd.
        recomputed *= layers / model.recomputed_blocks(execution.checkpointing) * (layers % 2)
    head, head_cast = weight_bytes * head_parameters, cast * head_parameters
    product = 2 if _half(execution.precision) else 4
    logits = tokens * sizes.loss / max(1, chunks)
    # The fused loss accumulates the head's gradient in fp32; in 16 bits a CPU also has the current chunk's gradient.
    head_sum = 4 * head_parameters if chunks else 0
    if chunks and product == 2 and execution.device == "cpu":
        logits = max(logits, tokens * product * model.padded_vocab_size / chunks + product * head_parameters)
    # A tied head's gradient stays until autograd adds the embedding's, and then adds the sum to the accumulated
    # gradient. The fused loss has the head's gradient in a separate tensor, to which autograd adds the embedding's in
    # place (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp).
    head_gradient = head if model.tied or not accumulated else 0
    sums = head * ((1 if chunks else 2) * model.tied + bool(accumulated))
    at_the_end = all_gradients
    if whole:  # A whole graph returns all gradients at once, with the embedding's already added.
        sums, at_the_end = head * model.tied, all_gradients + accumulated
    # For a CPU Inductor computes a tied head's gradient last, in one operation that adds it to the embedding's.
    late = whole and execution.device == "cpu" and not chunks and model.tied and product == weight_bytes
    kept_logits = tokens * product * (model.padded_vocab_size + model.width) * late
    if late:
        head_gradient = 0
    # The gradients of the other blocks are separate tensors unless they are added to the accumulated gradients.
    matrices = 12 * model.width**2
    other_blocks = (layers - 1) * weight_bytes * matrices // shards if whole or not accumulated else 0
    # The gradient of the feed-forward half's second weight is computed while all of its block's activations are kept.
    # In a block compiled alone Inductor computes the weights' gradients last, when more memory has been freed than they
    # need.
    second = 0 if alone else product * matrices // 3
    # Without a fused kernel AdamW computes the updates of all weights at once, and Lion one at a time.
    updates = {"adamw": all_gradients, "lion": head}
    # A compiled loss has the gradients of the logits and of the head in memory together, unless the latter is computed
    # last.
    logits_with_head = product * head_parameters if (alone or whole) and not chunks and not late else 0

    return {
        LOSS: (
            accumulated + head_sum, casts + head_cast, saved + tokens * sizes.head_inputs, logits, logits_with_head,
        ),
        "the scaling of the loss's gradients": (
            accumulated + head_sum, casts, saved + tokens * sizes.head_inputs, 0, head_sum * (not whole),
        ),
        "the last block's backward pass": (
            accumulated + head_gradient, casts, saved + recomputed, kept_logits, tokens * sizes.working + second,
        ),
        "the first block's backward pass": (
            accumulated + head_gradient + other_blocks, casts, positions + tokens * sizes.block + mask, kept_logits,
            tokens * sizes.working + second,
        ),
        "the embeddings' backward pass": (
            at_the_end, 0, 0, kept_logits, sums,
        ),
        "the optimizer's step": (
            all_gradients, 0, 0, 0, 0 if execution.offload_optimizer else updates.get(optimizer, 0),
        ),
    }  # fmt: skip


def _weight_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of one weight, and of its gradient."""
    return 2 if optimizer == "adamw-bf16" else 4


def _shards(workers: int, shard: bool) -> int:
    """Return the number of workers among which weights, gradients and the optimizer's state are sharded."""
    return workers if shard else 1


def token_sizes(model: ModelConfig, micro_batch: int, execution: Execution, kind: str) -> BytesPerToken:
    """Return the bytes per token. The residual stream is fp32 unless all activations are bf16."""
    width, scores = model.width, model.heads * model.context_length
    half, eager = _half(execution.precision), _is_eager(execution)
    fused = _loss_chunks(model.context_length, micro_batch, execution) > 0
    product = 2 if half else 4
    stream = 2 if execution.precision == "bf16-activations" else 4
    matmuls = product * width * (3 + 1 + 4)  # queries, keys, values; attention's output; the wide layer's output
    # Each norm keeps its input, a mean and a deviation; in a block compiled alone the second norm keeps attention's
    # output instead of the sum to which it is added.
    norms = stream * width + (product if execution.compile == "blocks" else stream) * width + 16
    between = product * width * (1 + 1 + 4)  # the outputs of norms and GELU, inputs of the products after them
    attention, attention_working = 4.0 * model.heads, 0.0  # flash keeps the logarithm of each row's sum
    noise = 1 if kind == "cuda" else product  # CUDA's dropout keeps a mask of bytes, the CPU's a mask of factors
    dropped = (2 * width * noise) if model.dropout else 0
    if _materializes(model, execution.attention, kind):
        softmax = 4 + 2 if kind == "cuda" and half else product  # autocast's softmax is fp32 on CUDA
        attention = scores * (softmax + (noise + product if model.dropout else 0))
        # The gradients of the scores, minus the memory that the feed-forward half has freed by then.
        attention_working = product * (2 * scores - 9 * width)
    block = matmuls + norms + between + attention + dropped
    recomputed = model.recomputed_blocks(execution.checkpointing)
    saved = {
        "none": block,
        "alternate": (recomputed * stream * width + (model.layers - recomputed) * block) / model.layers,  # A mean.
        "full": stream * width,
        "selective": stream * width + matmuls + 2 * product * width,  # The last term is both projections' outputs.
        **{kind: part * block + (1 - part) * stream * width for kind, part in ACTIVATION_BUDGETS.items()},
    }[execution.checkpointing]
    if execution.checkpointing == "selective" and _materializes(model, execution.attention, kind):
        saved -= product * width
    # The working memory has the residual stream's gradient and one gradient as wide as GELU: eager execution has freed
    # the input of the product after GELU, and compiled code writes GELU's input gradient over its output gradient.
    block_working = stream * width + 4 * width * product
    if execution.compile == "blocks":
        # The gradient of the block's output, and its sum with the second norm's input gradient; the gradients of the
        # outputs of the second norm and of attention, and of queries, keys and values. GELU's gradient takes the place
        # of GELU's input.
        block_working = 2 * stream * width + 5 * width * product
    embedding = (1 if kind == "cuda" else 4) * width if model.dropout else 0
    head_input, logits = product, 12 if eager else product
    if fused:
        head_input += product  # its gradient
        if eager:
            head_input += stream if stream != product else 0  # The norm's output before it is cast.
            # Besides a chunk's logits there are their log-softmax in fp32 and, for bf16, their copy in fp32, from which
            # it is computed; only CUDA's kernel for fp16 reads 16 bits and writes 32.
            logits = product + 4 + (4 if half and execution.precision != "fp16" else 0)
    return BytesPerToken(
        block=block,
        saved=saved,
        working=max(block_working, attention_working),
        head_inputs=stream * width + head_input * width + 16 + embedding,
        loss=model.padded_vocab_size * logits,
    )


def published_activations(model: ModelConfig, micro_batch: int, precision: Precision) -> int:
    """Return the bytes of the blocks' activations by the formula of Korthikanti et al. (arXiv 2205.05198, equation 1).

    sbh(34 + 5as/h) for a block in 16 bits (s: context length, b: micro-batch, h: width, a: heads), and twice that in
    32 bits. It includes dropout and the T x T matrix, without recomputation.
    """
    size = 1 if _half(precision) else 2
    length, width = model.context_length, model.width
    return round(size * model.layers * length * micro_batch * width * (34 + 5 * model.heads * length / width))


def optimizer_bytes(model: ModelConfig, optimizer: Optimizer, parameters: int) -> int:
    """Return the bytes of the optimizer's state for this number of parameters."""
    matrices = model.layers * 12 * model.width**2
    bytes_per_parameter = {
        "adamw": 8, "adamw-fused": 8, "adamw-8bit": 2, "adamw-bf16": 4, "adafactor": 0, "lion": 4, "sgd": 4,
    }  # fmt: skip
    if optimizer == "muon":  # One momentum for the blocks' matrices, AdamW's two moments for the others.
        return 4 * matrices + 8 * (parameters - matrices)
    return bytes_per_parameter[optimizer] * parameters


def _loss_chunks(context_length: int, micro_batch: int, execution: Execution) -> int:
    """Return the number of chunks of the fused loss; 0 for the plain loss."""
    return chunk_count(execution.loss, execution.loss_chunks, micro_batch * context_length)


def _materializes(model: ModelConfig, attention: Attention, kind: str) -> bool:
    """Return whether the T x T matrix is written to memory; on a CPU torch's fused kernel does not support dropout."""
    return attention == "manual" or (kind == "cpu" and model.dropout > 0)


def _is_eager(execution: Execution) -> bool:
    """Return whether operations run one by one, so that autograd stores the tensors of each."""
    return execution.compile in ("off", *EAGER_BACKENDS)


def _half(precision: Precision) -> bool:
    return precision in HALF_PRECISIONS
