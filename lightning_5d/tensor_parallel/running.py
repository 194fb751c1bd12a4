"""Which modules' forwards are running, and whose code is at work: what the guards of a first step ask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lightning_5d.absent import Absent

_GUARDS = (
    tuple(
        str(Path(__file__).with_name(name))
        for name in (
            "running.py",
            "weight_uses.py",
            "head_sizes.py",
            "sequence_mixing.py",
            "first_step.py",
            "feature_uses.py",
        )
    )
    + tuple(
        str(Path(__file__).parents[1] / "context_parallel" / name)
        for name in ("redirect.py", "first_step.py", "token_dims.py", "place.py", "doors.py")
    )
    + (str(Path(__file__).parents[1] / "expert_parallel" / "weight_uses.py"),)
    + (str(Path(__file__).parents[1] / "replaced_forward.py"),)
)
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_MODELS, _LAYERS, _AXIS = (
    str(Path(_OWN, "models")),
    str(Path(_OWN, "tensor_parallel")),
    str(Path(__file__).with_name("axis.py")),
)
_LAYERS_OF_TORCH, _MODULE = str(Path(_TORCH, "nn", "modules")), str(Path(_TORCH, "nn", "modules", "module.py"))
_RECOMPUTING = (str(Path(_OWN, "recomputation.py")), str(Path(_TORCH, "utils", "checkpoint.py")))
_BETWEEN = str(Path(_TORCH, "distributed"))
# Of torch these act on weights by themselves: they gather, reduce and run blocks again.
_MACHINERY = tuple(str(Path(_TORCH, *path)) for path in (("distributed",), ("autograd",), ("utils", "checkpoint.py")))


class Running:
    """The modules whose forward runs, outermost first. After an error: those that it came through.

    Attributes:
        names: Their fully-qualified names.
        modules: The modules.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.modules: list[nn.Module] = []

    @contextmanager
    def following(
        self, module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Iterator[None]:
        """A context in which it is known what runs of a module.

        Args:
            module: All modules inside of it are followed, but for the inside of compiled ones.
            around: Wraps the calls of those.
        """
        self.names, self.modules = [], []
        handles: list[Any] = []
        compiled: list[tuple[nn.Module, str, Any]] = []
        inside = ""
        for name, inner in module.named_modules():
            if isinstance(inner, Absent) or (inside and name.startswith(inside)):
                continue
            attribute = _compiled_attribute(inner)
            if attribute is not None:
                inside = f"{name}." if name else ""
                original = vars(inner)[attribute]
                compiled.append((inner, attribute, original))
                vars(inner)[attribute] = around(original)
                if not inside:
                    break
                continue
            # Around all other hooks: what those do belongs to the module as well.
            handles.append(inner.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            handles.append(inner.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for inner, attribute, original in compiled:
                vars(inner)[attribute] = original

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.names.append(name)
        self.modules.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Those above it have ended with an error that somebody caught.
        while self.modules:
            self.names.pop()
            if self.modules.pop() is module:
                break

    @property
    def place(self) -> str:
        """Where the code is that runs, for a person."""
        if not self.modules:
            return "the step"
        name, kind = self.names[-1], type(self.modules[-1]).__name__
        return f"the forward of {name} ({kind})" if name else f"the forward of {kind}"


def calling_line() -> str | None:
    """File and line of the code that called into torch; ``None`` if that is this package or a part of torch that acts by itself."""
    frame: FrameType | None = sys._getframe(1)
    by_layer = False
    while frame is not None:
        file = frame.f_code.co_filename
        # What runs a layer of torch so that it can run again does nothing to tokens itself.
        by_layer = by_layer or (file.startswith(_LAYERS_OF_TORCH) and file != _MODULE)
        if by_layer and file in _RECOMPUTING:
            frame = frame.f_back
            continue
        if file not in _GUARDS and not file.startswith("<"):
            if file.startswith(_MACHINERY) or _is_ours(file):
                return None
            if not file.startswith(_TORCH):
                return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def came_between_ranks(error: BaseException) -> bool:
    """Whether an error is one of ranks that wait for each other, and not of the code that they run."""
    trace, files = error.__traceback__, [""]
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    last = [file for file in files if not file.startswith(_TORCH) and file not in _GUARDS][-1]
    return files[-1].startswith(_BETWEEN) or (_is_ours(last) and not last.startswith(_LAYERS)) or last == _AXIS


def _is_ours(file: str) -> bool:
    return file.startswith(_OWN) and not file.startswith(_MODELS)


def _compiled_attribute(module: nn.Module) -> str | None:
    """Where the compiled code of a module is."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return "forward"
    # `module.compile()`; private, checked with torch 2.13.
    return "_compiled_call_impl" if module._compiled_call_impl is not None else None
