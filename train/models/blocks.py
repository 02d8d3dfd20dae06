"""The parts of a model, whatever its kind: repeated blocks, which are recomputed, compiled, sharded or converted as
units, the loss, and tensors that have several names."""

from torch import Tensor, nn


class LossModel(nn.Module):
    """A model whose loss is a unit of its own, which ``--compile blocks`` compiles separately."""

    def mean_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of the last block's output ``x``."""
        raise NotImplementedError


def find_block_lists(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The stacks of equal blocks in ``model``, by name: every ``ModuleList`` of modules of one class and one shape.

    Those within a block belong to it.
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
    """The blocks of all :func:`find_block_lists`, in the order of ``model``."""
    return [block for blocks in find_block_lists(model).values() for block in blocks]


def shared_names(model: nn.Module) -> dict[str, str]:
    """Names in the model's state of tensors that it has under an earlier name, too, with that name."""
    first: dict[int, str] = {}
    every = model.state_dict(keep_vars=True)
    return {name: first[id(value)] for name, value in every.items() if first.setdefault(id(value), name) != name}
