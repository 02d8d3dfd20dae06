"""Parts of models of all kinds: repeated blocks, the loss, and tensors with several names.

Repeated blocks are the units of recomputation, compilation, sharding and conversion to 8-bit matrix products.
"""

from torch import Tensor, nn


class LossModel(nn.Module):
    """A model with a separate method for its loss, which ``--compile blocks`` compiles as one unit."""

    def mean_loss(self, x: Tensor, targets: Tensor, head: Tensor) -> Tensor:
        """Compute the loss from the last block's output ``x`` and the weight of the head."""
        raise NotImplementedError


def find_block_lists(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Find the lists of identical blocks in ``model``: each ``ModuleList`` of modules of one class and shape, by name.

    Lists inside a block are not included.
    """
    block_lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in block_lists)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            kinds = {(type(block), tuple((n, p.shape) for n, p in block.named_parameters())) for block in module}
            if len(kinds) == 1 and next(iter(kinds))[1]:
                block_lists[name] = list(module)
    return block_lists


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all lists that :func:`find_block_lists` finds, in the order of ``model``."""
    return [block for blocks in find_block_lists(model).values() for block in blocks]


def shared_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tensors in the model's state that have several, each with the first name of its
    tensor."""
    first_names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {
        name: first_names[id(value)] for name, value in state.items() if first_names.setdefault(id(value), name) != name
    }
