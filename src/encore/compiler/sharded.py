"""Models that FSDP2 shards: which session plans them, and what a rank has of them between two steps.

FSDP2 gathers the parameters of a block in hooks around it, and Dynamo never traces these hooks. So the step of a
sharded model is one of several calls, however it is compiled: whole, where Dynamo ends a graph at every block, or
block by block. A budget bounds all of it, so blocks that are compiled one by one share the session of their root: the
outermost module whose parameters are gathered and reduced together with theirs. Its forward begins a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from encore.capture import torch_private
from encore.compiler.ranks import RankAgreement
from encore.compiler.session import Session
from encore.compiler.sharded_memory import GroupMemory, most_around, with_most
from encore.errors import OptionError
from encore.graph.torch_private import pytree
from encore.options import Options
from encore.plan.calls import Around

_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
"""Those that blocks which were compiled one by one share, by their root."""


class ShardedModel:
    """The modules of one root that FSDP2 shards."""

    def __init__(self, root: nn.Module, name: str, options: Options) -> None:
        self._root = weakref.ref(root)
        self.ranks = next((group.ranks for group in torch_private.parameter_groups(root)), ())
        """Of the processes that have a shard of the first group."""
        self._given = 0
        self.agreement = RankAgreement(name, options, self.ranks)

    @property
    def root(self) -> nn.Module | None:
        return self._root()

    def note_inputs(self, args: Any, kwargs: Any) -> None:
        """The root is called with these arguments, which are there during the step."""
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        self._given = max(self._given, _bytes_of(tensors))

    @property
    def resident(self) -> int:
        """Bytes that are there before and after a step: shards, what is not sharded, and the inputs."""
        root = self.root
        return self._given + (0 if root is None else _bytes_of(torch_private.local_tensors(root)))

    def around(self, around: Sequence[Around]) -> list[Around]:
        """What is around every call, with what FSDP2 allocates around it at most."""
        root = self.root
        groups = [] if root is None else [GroupMemory.of(one) for one in torch_private.parameter_groups(root)]
        return with_most(around, most_around(groups))

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients that this rank has."""
        root = self.root
        return [] if root is None else torch_private.local_gradients(root)


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """The bytes of their memory, each block once."""
    memory = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(memory.values())


def session_of_step(module: nn.Module, session: Session) -> Session:
    """The session that plans the calls of a compiled module: its own, or the one that it shares with other parts of a
    sharded model. Its own learns whether it is sharded."""
    root = torch_private.sharded_root(module)
    if root is None:
        return session
    if root is module or session.options.budget is None:
        _shard(session, root)
        return session
    shared = _sessions.get(root)
    whole = getattr(root._compiled_call_impl, "session", None)
    if shared is None and isinstance(whole, Session):
        shared = whole
    if shared is None:
        shared = _sessions[root] = Session(type(root).__name__, session.options)
        _shard(shared, root)
        shared.begins_with_root = True
        shared.begin_call()
        _begin_steps_at(root, shared)
    elif shared.options != session.options:
        raise OptionError(
            f"parts of one sharded {type(root).__name__} were compiled with different options: {session.options}, and "
            f"before {shared.options}. One budget bounds the whole step of a rank: give all parts the same options, or "
            "call encore.compile on the root alone"
        )
    return shared


def _shard(session: Session, root: nn.Module) -> None:
    session.sharded = ShardedModel(root, session.name, session.options)
    session.gathers = True
    session.sharded.agreement.require_same_options()


def _begin_steps_at(root: nn.Module, session: Session) -> None:
    """Have every call of the root with gradients enabled begin a step."""
    reference = weakref.ref(session)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = reference()
        if found is not None and found.sharded is not None and torch.is_grad_enabled():
            found.sharded.note_inputs(args, kwargs)
            found.begin_call()

    root.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)


def shared_session(module: nn.Module) -> Session | None:
    """The session that the blocks of a root share, which is not compiled itself."""
    return _sessions.get(module)
