"""Predicted peak memory by part."""

from dataclasses import dataclass, fields

CONTEXT = {"cuda": 500 * 2**20, "cpu": 600 * 2**20}
"""Bytes outside the allocator: the CUDA context and kernels; on the CPU the interpreter with torch, Ray and MLflow."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Predicted memory at the moment of the peak, in bytes by part."""

    weights: int
    """Bytes of the weights."""
    gradients: int
    """Bytes of the gradients in memory at the peak."""
    optimizer: int
    """Bytes of the optimizer's state."""
    casts: int
    """16-bit copies of the weights, which the backward pass needs."""
    activations: int
    """Activations that are saved for the backward pass."""
    logits: int
    """Logits, their gradient, and the loss's intermediate results."""
    working: int
    """Temporary results of the current block or of the optimizer."""
    workspace: int
    """Workspaces of cuBLAS."""
    unused: int
    """Memory that torch's allocator reserves but cannot use."""
    context: int
    """Memory of the process outside torch's allocator, such as the CUDA context."""
    moment: str
    """The moment at which the peak occurs, as a noun phrase."""

    @property
    def total(self) -> int:
        """Memory of the process on the device."""
        return sum(self.parts().values())

    @property
    def allocated(self) -> int:
        """Memory that torch's allocator has allocated to tensors."""
        return self.reserved - self.unused

    @property
    def reserved(self) -> int:
        """Memory that torch's allocator has reserved on the device, with expandable segments on a GPU."""
        return self.total - self.context

    def parts(self) -> dict[str, int]:
        """Return the bytes by the part's name, in the order of a table."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}
