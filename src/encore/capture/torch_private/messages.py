"""Messages that do not end a graph: `print`, `warnings.warn` and methods of loggers, given constants alone.

Dynamo ends a graph at each of them. Their arguments are constants of the graph, which guards make sure of, so the same
message is written right after the graph instead, in the same order as all others: whatever else writes or reads runs
between graphs. A warning or log record names the line that it came from, as in eager. The graph ends as before where
the place of a message could be seen: inside `with` and `try`, whose handlers or contexts may change what becomes of
it, and in regions that run more than once (checkpoints); and at messages with tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable

from encore.capture.torch_private.replacements import replaced_readers

LEVELS = {name: getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error", "critical")}
ONCE = frozenset({"warning_advice", "warning_once", "info_once"})
"""Methods that Hugging Face's libraries add to loggers."""


class _Later(VariableTracker):
    """A call without arguments that runs after the graph."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = torch._dynamo.disable(call, reason="encore: a message between graphs")

    def reconstruct(self, codegen: Any) -> None:
        name = codegen.tx.output.install_global_by_id("encore_message", self.call)
        codegen.tx.output.update_co_names(name)
        codegen.append_output(create_instruction("LOAD_GLOBAL", argval=name))


def _constants(tx: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a message that can be written after the graph; None if the graph has to end at it."""
    frame = tx
    while frame is not None:
        if frame.block_stack or frame.active_generic_context_managers:
            return None
        frame = frame.parent
    given = [*args, *kwargs.values()]
    if not tx.output.is_root_tracer() or tx.export or not all(one.is_python_constant() for one in given):
        return None
    return [one.as_python_constant() for one in args], {name: kwargs[name].as_python_constant() for name in kwargs}


def _write_later(tx: Any, call: Callable[[], Any]) -> VariableTracker:
    tx.output.root_tx.debug_locals.append((_Later(call), []))
    return VariableTracker.build(tx, None)


class _Print(BuiltinVariable):
    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        found = _constants(tx, args, kwargs)
        if found is None:
            return super().call_function(tx, args, kwargs)
        return _write_later(tx, functools.partial(print, *found[0], **found[1]))


WARN = inspect.signature(warnings.warn)


class _Warn(SkipFunctionVariable):
    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        found = _constants(tx, args, kwargs)
        given = None if found is None else WARN.bind(*found[0], **found[1])
        if given is None or set(given.arguments) - {"message", "category"} or warnings.warn is not self.value:
            return super().call_function(tx, args, kwargs)
        message, names = given.arguments["message"], tx.f_globals
        call = functools.partial(
            warnings.warn_explicit,
            message,
            given.arguments.get("category") or UserWarning,
            tx.f_code.co_filename,
            tx.lineno,
            names.get("__name__", "<string>"),
            names.setdefault("__warningregistry__", {}),
        )
        return _write_later(tx, call)


class _Logger(LoggingLoggerVariable):
    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        known = name in ONCE or (name in LEVELS and getattr(logging.Logger, name) is LEVELS[name] and not kwargs)
        found = _constants(tx, args, kwargs) if known and name not in vars(self.value) else None
        if found is None:
            return super().call_method(tx, name, args, kwargs)
        if name in ONCE:
            return _write_later(tx, functools.partial(getattr(self.value, name), *found[0], **found[1]))
        code, level = tx.f_code, getattr(logging, name.upper())
        place = (code.co_filename, tx.lineno)
        return _write_later(tx, functools.partial(_log, self.value, level, place, code.co_name, *found[0]))


def _log(logger: logging.Logger, level: int, place: tuple[str, int], function: str, text: Any, *args: Any) -> None:
    """What a method of the logger does when it is called there."""
    if logger.isEnabledFor(level):
        logger.handle(logger.makeRecord(logger.name, level, *place, text, args, None, function))


def _print_reader(builder: VariableBuilder, value: Any) -> Any:
    builder.install_guards(GuardBuilder.BUILTIN_MATCH)
    return _Print(value, source=builder.source)


def _warn_reader(builder: VariableBuilder, value: Any) -> Any:
    builder.install_guards(GuardBuilder.ID_MATCH)
    return _Warn(value, source=builder.source)


def _logger_reader(builder: VariableBuilder, value: Any) -> Any:
    builder.install_guards(GuardBuilder.ID_MATCH)
    return _Logger(value, source=builder.source)


FUNCTIONS = {print: _print_reader, warnings.warn: _warn_reader}
TYPES: dict[type, Any] = {logging.Logger: _logger_reader}


def messages_after_graphs() -> contextlib.AbstractContextManager[None]:
    """Have Dynamo write messages after the graph that they are in, where nothing else shows it."""
    return replaced_readers(FUNCTIONS, TYPES)
