"""A close look at the first step of each kind: whether modules inside doors treat a rank's tokens as if they were all.

Attention of its own making, a convolution, a mean over tokens, positions that are counted: none of it fails on a part of a sequence, and
all of it computes something else. Everything here costs a first step some time and later ones nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.place import refused
from lightning_5d.context_parallel.redirect import Redirect
from lightning_5d.context_parallel.token_dims import DIMENSIONS, PRODUCTS, Dims, TokenDims, dims_of, einsum_terms
from lightning_5d.pipeline_parallel.stage.run import StageBoundary
from lightning_5d.tensor_parallel.running import calling_line, came_between_ranks

_OTHERS = (MisconfigurationException, torch.OutOfMemoryError, dist.DistError)
_ASKS = frozenset(["__get__", "dim", "size", "stride", "numel", "is_contiguous", "is_floating_point", "data_ptr", "ndimension"])  # fmt: skip
_TOTALS = frozenset(["mean", "sum", "std", "var", "norm", "prod", "std_mean", "var_mean", "nanmean", "nansum", "linalg_vector_norm", "linalg_norm", "median"])  # fmt: skip
_FOURIER = frozenset(["fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"])
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_OVER_LAST = frozenset(["conv1d", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "conv_transpose1d", "interpolate"])  # fmt: skip
_PICKS = frozenset(["select", "index_select", "narrow", "gather", "take_along_dim", "split", "chunk", "unbind", "tensor_split", "unfold"])  # fmt: skip
# Where these have a dimension among their arguments.
_PLACE = {"gather": 1, "select": 1, "index_select": 1, "narrow": 1, "unbind": 1, "unfold": 1, "take_along_dim": 2, "split": 2, "chunk": 2, "tensor_split": 2}  # fmt: skip
_ADDING = frozenset(["add", "sub", "mul", "where", "__add__", "__radd__", "__iadd__", "__mul__", "__rmul__", "__sub__", "__and__", "masked_fill", "add_", "mul_", "maximum", "minimum", "logical_and", "bitwise_and", "__or__"])  # fmt: skip
# Hugging Face's: what a cache keeps of keys, and what masks are made of that are only stated; a step computes with neither.
_UNUSED = ("cache_utils.py", "masking_utils.py")
_MIXER = re.compile(r"attention|attn|mixer|mamba|rwkv|ssm|retention|hyena|deltanet|recurren", re.IGNORECASE)

_AT_USER_LEVEL = "The sequence is whole in training_step: do it there, with what the module returns, or take ContextParallel out of FiveD."
_BY_ATTENTION = "Only torch.nn.functional.scaled_dot_product_attention sees all tokens; for a Hugging Face model set attn_implementation='sdpa'."
_POSITIONS = (
    "Let its forward take position_ids, which it then is given as positions in the whole sequence, and use them in place of what it counts itself, or"
    " compute what depends on positions in training_step."
)


class FirstStep:
    """The guards of one module.

    Args:
        module: The module.
        redirect: What is active inside its doors.
        outside: Whether code of the user's level is running, and no door is open or about to.
    """

    def __init__(self, module: nn.Module, redirect: Redirect, outside: Callable[[], bool] = lambda: False) -> None:
        self._module, self._redirect, self._outside = module, redirect, outside
        self._watched: set[str] = set()

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        """A context around a step's call; does nothing after the first one of its kind that ended well.

        Args:
            kind: What kind of step it is: ``"train"``, ``"validate"``, …, and of which stage.

        Raises:
            MisconfigurationException: From inside, if a module's code does not fit to a part of the sequence: says what, where, and what
                to do.
        """
        if kind in self._watched:
            yield
            return
        watch = _Watch(list(self._module.buffers()))
        before, self._redirect.watch = self._redirect.watch, watch
        calls = self._redirect.calls, self._redirect.whole_keys
        try:
            # Compiled code would have to be compiled anew once it is gone.
            with nullcontext() if self._is_compiled() else _UserLevel(self._module, watch, self._outside):
                yield
        except StageBoundary:  # a stage of a pipeline has come to its end
            self._watched.add(kind)
            raise
        except Exception as error:
            watch.explain(error)
            raise
        finally:
            self._redirect.watch = before
        if watch.inside is not None and (self._redirect.calls, self._redirect.whole_keys) == calls:
            self._look_for_mixers(watch.inside, watch.doors)
        self._watched.add(kind)

    def _is_compiled(self) -> bool:
        return any(
            hasattr(inner, "_orig_mod") or inner._compiled_call_impl is not None for inner in self._module.modules()
        )

    def _look_for_mixers(self, inside: Inside, doors: set[str]) -> None:
        modules = dict(self._module.named_modules())
        for name, module in modules.items():
            if doors <= set(modules) and not any(name == door or name.startswith(f"{door}.") for door in doors):
                continue  # it has computed on whole sequences
            if _MIXER.search(type(module).__name__):
                cut = inside.sequence.cut
                raise MisconfigurationException(
                    f"{name} ({type(module).__name__}) looks as if it mixed tokens, and no call of scaled_dot_product_attention was seen in the"
                    f" first step, in which each of {cut.size} ranks of ContextParallel had {cut.local} of {cut.length} tokens. {_BY_ATTENTION}"
                )


class _UserLevel(TorchFunctionMode):
    """Looks for what is of a rank's own tokens and has come out of a door by another way than its outputs: tensors, and gradients of weights."""

    def __init__(self, module: nn.Module, watch: _Watch, outside: Callable[[], bool]) -> None:
        super().__init__()
        self._module, self._watch, self._outside = module, watch, outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Private; checked with torch 2.13. In backward, functions find what they have saved inside.
        if self._outside() and torch._C._current_graph_task_id() == -1 and getattr(func, "__name__", "") not in _ASKS:
            self._watch.left()
            found = next((x for x in tree_leaves((args, kwargs)) if self._watch.escaped(x)), None)
            if found is not None and (line := calling_line()) is not None:
                self._watch.refuse(found, f"{getattr(func, '__name__', func)}, {line}")
            if func is torch.autograd.grad:
                self._look_at_inputs(kwargs["inputs"] if "inputs" in kwargs else args[1])
        return func(*args, **kwargs)

    def _look_at_inputs(self, inputs: Any) -> None:
        wanted = set(map(id, tree_leaves(inputs)))
        for name, parameter in self._module.named_parameters():
            if id(parameter) in wanted and any(name.startswith(f"{door}.") for door in self._watch.doors):
                raise MisconfigurationException(
                    f"torch.autograd.grad asks for the gradient of {name} in the step. On each rank of ContextParallel that is"
                    " the gradient of its tokens; it is complete from on_before_optimizer_step on, in its `grad`. Ask for gradients of what the"
                    " model returned, or take ContextParallel out of FiveD."
                )


class _Watch:
    """Looks at one step."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.inside: Inside | None = None
        self.doors: set[str] = set()
        self._buffers = frozenset(map(id, buffers))
        plain = [buffer for buffer in buffers if type(buffer) in (Tensor, nn.Buffer)]
        self._memory = frozenset(buffer.untyped_storage().data_ptr() for buffer in plain)
        self._dims: TokenDims | None = None
        self._escaped: dict[int, tuple[ReferenceType[Tensor], Inside]] = {}

    def left(self) -> None:
        """Keeps in mind, weakly, what has been made in the door that was open last."""
        if self._dims is None or self.inside is None:
            return
        for tensor in self._dims.made():
            self._escaped[id(tensor)] = ref(tensor), self.inside
        self._dims = None

    def escaped(self, x: Any) -> bool:
        """Whether it was made of a rank's tokens inside of a door, and is none of its outputs."""
        known = self._escaped.get(id(x))
        return known is not None and known[0]() is x

    def refuse(self, x: Tensor, where: str) -> None:
        """Raises what is wrong with using it."""
        inside = self._escaped[id(x)][1]
        raise MisconfigurationException(
            f"The step uses a tensor {tuple(x.shape)} that a module inside {inside.name} has kept ({where}), in an attribute or by a hook. It was"
            f" made of {inside.sequence.cut.local} of {inside.sequence.cut.length} tokens on each rank of ContextParallel. Let the forward of"
            f" {inside.name} return it: what it returns is put together again."
        )

    def attended(self, inside: Inside, q: Tensor, k: Tensor) -> None:
        """Looks at queries: their tokens have to be where attention takes them."""
        dims = self._at(inside)
        if dims is None:
            return
        found = dims.of(q)
        last = frozenset([q.ndim - 2])
        if (found.tokens or found.rows) and not (found.tokens | found.rows) & last:
            raise refused(
                inside,
                f"has attention {tuple(q.shape)} over a dimension that happens to be as long as a rank's part of the sequence",
                "Choose another length of the sequence.",
            )

    def compared(self, inside: Inside, numbers: Tensor) -> None:
        """Looks at numbers of tokens of which a mask is made: those that a rank counted itself say nothing of the others' tokens."""
        dims = self._at(inside)
        is_kept = numbers.untyped_storage().data_ptr() in self._memory
        if is_kept or (dims is not None and dims.of(numbers).own):
            local, line = inside.sequence.cut.local, calling_line()
            where = "" if line is None else f" ({line})"
            what = "the first numbers of a buffer" if is_kept else "numbers that it counted"
            raise refused(
                inside, f"makes a mask of pairs of tokens{where} of {what} for {local} tokens of a rank", _POSITIONS
            )

    def look(self, inside: Inside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Looks at an operation."""
        name = getattr(func, "__name__", "")
        if name in _ASKS and not (name == "__get__" and isinstance(output, Tensor)):
            return
        dims = self._at(inside)
        if dims is None:
            return
        if func is F.scaled_dot_product_attention:
            dims.follow("", args[:1] or (kwargs["query"],), {}, output)
            return
        plain = name if name.startswith("__") else name.removesuffix("_")
        found = _finding(plain, args, kwargs, dims)
        line = calling_line() if found is not None else None
        if found is not None and line is not None and not line.startswith(_UNUSED):
            what, fix = found
            raise refused(inside, f"{what} ({name}, {line})", fix)
        dims.follow(plain, args, kwargs, output)

    def explain(self, error: Exception) -> None:
        """Raises a better error for one that has to do with lengths of sequences."""
        inside = self.inside
        if inside is None or isinstance(error, _OTHERS) or came_between_ranks(error):
            return
        cut = inside.sequence.cut
        numbers = {int(number) for number in re.findall(r"\d+", str(error))}
        if cut.local not in numbers or cut.length not in numbers:
            return
        raise MisconfigurationException(
            f"A module inside {inside.name} failed in its first run with ContextParallel, where each of {cut.size} ranks has {cut.local} of"
            f" {cut.length} tokens: {type(error).__name__}: {error}. Something in it has the length of the whole sequence. {_POSITIONS}"
        ) from error

    def _at(self, inside: Inside) -> TokenDims | None:
        if self.inside is not inside:
            self.left()
            self.inside = inside
            self.doors.add(inside.name)
            cut = inside.sequence.cut
            # Of one token nothing can be followed.
            self._dims = TokenDims(cut.local, cut.length, self._buffers) if cut.local > 1 else None
        return self._dims


def _finding(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dims: TokenDims) -> tuple[str, str] | None:
    """What an operation does to tokens that it may not, and what helps."""
    x = args[0] if args else kwargs.get("input", kwargs.get("tensors"))
    if name in ("cat", "concat", "concatenate", "hstack"):
        return _joined(x, args, kwargs, dims)
    if name == "einsum":
        return _einsum(args, dims)
    if not isinstance(x, Tensor):
        return None
    found = dims.of(x)
    if name in PRODUCTS and len(args) > 1:
        return _product(x, args[1], dims)
    if name in ("baddbmm", "addbmm", "addmm") and len(args) > 2:
        return _product(args[1], args[2], dims)
    if name in _ADDING:
        return _combined(args, dims)
    if not found.tokens and not found.rows and not found.merged:
        return None
    tokens = found.tokens
    if name == "batch_norm" and kwargs.get("training", args[5] if len(args) > 5 else False):
        return (
            "normalises over the tokens of one rank alone, of all sequences",
            "Use a norm over features, such as LayerNorm.",
        )
    mixes = "mixes tokens of one rank alone"
    if name in _RECURRENT:
        return mixes, _AT_USER_LEVEL
    if name == "linear" and x.ndim - 1 in tokens:
        return mixes, _AT_USER_LEVEL
    if name in _OVER_LAST and any(dim > 1 for dim in tokens):
        is_pointwise = name.startswith("conv") and len(args) > 1 and args[1].shape[2] == 1
        return None if is_pointwise else (mixes, _AT_USER_LEVEL)
    if name in ("conv2d", "conv3d", "max_pool2d", "avg_pool2d") and any(dim > 1 for dim in tokens):
        is_pointwise = name.startswith("conv") and set(args[1].shape[2:]) == {1}
        return None if is_pointwise else (mixes, _AT_USER_LEVEL)
    if name in ("group_norm", "instance_norm") and any(dim > 1 for dim in tokens):
        return mixes, "Use a norm over features, such as LayerNorm."
    if name in ("layer_norm", "rms_norm"):
        sizes = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        count = 1 if isinstance(sizes, int) else len(sizes)
        return (mixes, "Use a norm over features alone.") if any(dim >= x.ndim - count for dim in tokens) else None
    if name == "pad":
        widths = args[1] if len(args) > 1 else kwargs["pad"]
        padded = {x.ndim - 1 - i for i in range(len(widths) // 2) if any(widths[2 * i : 2 * i + 2])}
        return (f"adds to the {dims.length} tokens of a rank", _AT_USER_LEVEL) if padded & tokens else None
    if name in DIMENSIONS:
        over = set(dims_of(name, args, kwargs, x.ndim))
        if not over and name in ("sort", "argsort", "topk"):
            over = {x.ndim - 1}
        if not over and name in _TOTALS:
            over = set(range(x.ndim))
        # Whole numbers count and sort what is routed to experts, of all sequences; what becomes of a token does not depend on that.
        mixing = tokens | (
            found.rows | found.merged if x.is_floating_point() or name.startswith("cum") else frozenset()
        )
        return (mixes, _POSITIONS if name.startswith("cum") else _AT_USER_LEVEL) if over & mixing else None
    if name in _FOURIER:
        given = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return (mixes, _AT_USER_LEVEL) if given % x.ndim in tokens | found.merged else None
    if name in ("fft_fft2", "fft_fftn", "fft_rfft2", "fft_rfftn"):
        given = kwargs.get("dim", args[2] if len(args) > 2 else (-2, -1) if name.endswith("2") else None)
        taken = set(range(x.ndim)) if given is None else {dim % x.ndim for dim in given}
        return (mixes, _AT_USER_LEVEL) if taken & tokens else None
    if name in ("numpy", "tolist") and x.is_floating_point():
        return "takes the tokens of one rank out of torch", _AT_USER_LEVEL
    picked = f"picks some of the {dims.length} tokens of a rank"
    if name == "__getitem__":
        return (picked, _AT_USER_LEVEL) if _picks(args[1], x.ndim, tokens, dims.length) else None
    if name in _PICKS:
        place = _PLACE[name]
        given = kwargs.get("dim", args[place] if len(args) > place else 0)
        is_along = isinstance(given, int) and given % x.ndim in tokens
        return (picked, _AT_USER_LEVEL) if is_along and not _keeps_all(name, args, kwargs, dims.length) else None
    return None


def _keeps_all(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], length: int) -> bool:
    if name == "narrow":
        return bool(kwargs.get("length", args[3] if len(args) > 3 else None) == length)
    if name in ("split", "chunk"):
        size = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        return bool(size == (length if name == "split" else 1))
    return False


def _joined(parts: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dims: TokenDims) -> tuple[str, str] | None:
    tensors = [part for part in parts if isinstance(part, Tensor)] if isinstance(parts, tuple | list) else []
    given = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if len([part for part in tensors if part.numel()]) < 2 or not isinstance(given, int):
        return None
    if any(given % part.ndim in dims.of(part).tokens for part in tensors if part.ndim):
        return f"adds to the {dims.length} tokens of a rank", _AT_USER_LEVEL
    return None


def _product(a: Any, b: Any, dims: TokenDims) -> tuple[str, str] | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim < 2 or b.ndim < 2:
        return None
    left, right = dims.of(a).tokens, dims.of(b).tokens
    return _crossed(a.ndim - 2 in left and b.ndim - 1 in right, a.ndim - 1 in left or b.ndim - 2 in right, dims)


def _einsum(args: Sequence[Any], dims: TokenDims) -> tuple[str, str] | None:
    terms = einsum_terms(args)
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if terms is None:
        return None
    lettered = [
        {term[dim] for dim in dims.of(x).tokens if dim < len(term)} for term, x in zip(terms[0], operands, strict=False)
    ]
    kept = [letters & set(terms[1]) for letters in lettered]
    summed = any(letters - set(terms[1]) for letters in lettered)
    return _crossed(len(set().union(*kept)) > 1 if kept else False, summed, dims)


def _crossed(scores: bool, summed: bool, dims: TokenDims) -> tuple[str, str] | None:
    if scores:
        return f"makes scores of {dims.length} by {dims.length} tokens, those of one rank alone", _BY_ATTENTION
    return ("adds up over the tokens of one rank alone", _BY_ATTENTION) if summed else None


def _combined(args: Sequence[Any], dims: TokenDims) -> tuple[str, str] | None:
    tensors = [x for x in args if isinstance(x, Tensor)]
    tokens: Dims = frozenset(dim - x.ndim for x in tensors for dim in dims.of(x).tokens)
    own: Dims = frozenset(dim - x.ndim for x in tensors for dim in dims.of(x).own)
    if len(tensors) > 1 and tokens & own:
        return f"counts the {dims.length} tokens of a rank from 0 and takes that for their positions", _POSITIONS
    return None


def _picks(index: Any, ndim: int, tokens: Dims, length: int) -> bool:
    """Whether an index takes some of the tokens."""
    index = index if isinstance(index, tuple) else (index,)
    used = sum((x.ndim if isinstance(x, Tensor) and x.dtype == torch.bool else 1) for x in index if x is not None and x is not Ellipsis)  # fmt: skip
    dim = 0
    for x in index:
        if x is Ellipsis:
            dim += ndim - used
        elif isinstance(x, slice):
            if dim in tokens and x.indices(length) != (0, length, 1):
                return True
            dim += 1
        elif isinstance(x, Tensor) and x.dtype == torch.bool:
            dim += x.ndim  # a rank's own choice of its tokens, one by one
        elif x is not None:
            if dim in tokens:
                return True
            dim += 1
    return False
