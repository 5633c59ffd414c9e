"""What FSDP2 allocates around the calls of a step, by the sizes of its parameters.

Before forward of a group, the shards of all ranks are gathered into one buffer and copied out of it; the buffer stays
until the next group has filled its own. Before backward of a group its parameters are gathered again, and the shards
of the group before it into a buffer, ahead of their use. After its backward, gradients are copied into a buffer, which
is reduced into the gradients of this rank's shard, and stays until the next group has filled its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from encore.capture.torch_private import ParameterGroup, ShardedParameter
from encore.plan.calls import Around


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Bytes of one group of parameters."""

    shard: int
    """Between two steps."""
    gathered: int
    """The parameters, as they are computed with."""
    all_gather: int
    """The buffer that the shards of all ranks are gathered into."""
    cast: int
    """This rank's shard in the type of the buffer, if that is another one."""
    gradients: int
    """As backward makes them."""
    reduce_scatter: int
    """The buffer that gradients are copied into to be reduced."""
    reduced: int
    """The gradients of this rank's shard, in the type in which they are reduced."""
    shard_gradients: int
    """The same in the type of the shard."""
    stays: bool
    """Whether the parameters stay gathered from forward to backward."""

    @classmethod
    def of(cls, group: ParameterGroup) -> GroupMemory:
        """The bytes of a group."""
        every = group.parameters
        trained = [one for one in every if one.trained]

        def padded(one: ShardedParameter) -> int:
            """Elements of one rank's shard."""
            rows, *rest = one.shape or (1,)
            return -(-rows // group.shards) * math.prod(rest)

        all_gather = sum(padded(one) * group.shards * one.computed_in.itemsize for one in every)
        reduced = sum(padded(one) * one.reduced_in.itemsize for one in trained)
        return cls(
            shard=sum(padded(one) * one.dtype.itemsize for one in every),
            gathered=all_gather,
            all_gather=all_gather if group.shards > 1 else 0,
            cast=sum(padded(one) * one.computed_in.itemsize for one in every if one.computed_in != one.dtype),
            gradients=sum(math.prod(one.shape) * one.computed_in.itemsize for one in trained),
            reduce_scatter=reduced * group.shards,
            reduced=reduced,
            shard_gradients=sum(padded(one) * one.dtype.itemsize for one in trained),
            stays=group.stays,
        )


def most_around(groups: Sequence[GroupMemory]) -> Around:
    """The most that is there around any call of a step, whichever group it belongs to."""
    stays = sum(one.gathered for one in groups if one.stays)
    own = max((one.gathered for one in groups if not one.stays), default=0)
    ahead = max((one.all_gather for one in groups), default=0)
    reducing = max((one.reduce_scatter for one in groups), default=0)
    results = sum(one.shard_gradients for one in groups)
    gradients = max((one.gradients + max(0, one.reduced - one.shard_gradients) for one in groups), default=0)
    cast = max((one.cast for one in groups), default=0)
    forward = stays + own + ahead
    backward = stays + own + ahead + reducing + results
    between = max(stays + own + 2 * ahead + cast, stays + ahead + 2 * reducing + gradients + results)
    return Around(forward, backward, max(between, forward, backward))


def with_most(around: Sequence[Around], most: Around) -> list[Around]:
    """What is around every call, and what FSDP2 allocates around it at most."""
    return [
        dataclasses.replace(
            one,
            forward=one.forward + most.forward,
            backward=one.backward + most.backward,
            between=max(one.between, one.forward, one.backward) + most.between,
        )
        for one in around
    ]
