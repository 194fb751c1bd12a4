"""Calls of attention inside a door, which go to all ranks' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # private; checked with torch 2.13
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lightning_5d.context_parallel.attention import ContextAttention, default_scale
from lightning_5d.context_parallel.comparisons import COMPARISONS, compared
from lightning_5d.context_parallel.dropout import DRAWS, DROPOUT, RandomParts, is_active
from lightning_5d.context_parallel.given_masks import GivenMasks
from lightning_5d.context_parallel.hugging_face_loss import LOSSES, answer_loss
from lightning_5d.context_parallel.hugging_face_masks import stating_masks
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.pairs import PairMask, Pairs, Purpose
from lightning_5d.context_parallel.place import refused
from lightning_5d.context_parallel.repeated_heads import RepeatedHeads
from lightning_5d.context_parallel.stated_mask import StatedMask
from lightning_5d.context_parallel.stated_pairs import stated
from lightning_5d.context_parallel.triangle import made
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.model_flops import shared_attention

_ATEN = torch.ops.aten
_PRODUCT = F.scaled_dot_product_attention
_CALLS = (_PRODUCT, _ATEN.scaled_dot_product_attention, _ATEN.scaled_dot_product_attention.default)
_TRIANGLES = (torch.tril, Tensor.tril, torch.triu, Tensor.triu)
_NOTED = frozenset([*_TRIANGLES, *RepeatedHeads.CALLS, *COMPARISONS])
# What `scaled_dot_product_attention` chooses from; models that call one of these themselves are rare.
_KERNELS = tuple(
    call
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
    for call in (getattr(_ATEN, name), getattr(_ATEN, name).default)
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Watch(Protocol):
    """Somebody who looks at everything that happens inside a door."""

    def look(self, inside: Inside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Looks at an operation that has run."""

    def attended(self, inside: Inside, q: Tensor, k: Tensor) -> None:
        """Looks at the queries and keys of attention that is about to run."""

    def compared(self, inside: Inside, numbers: Tensor) -> None:
        """Looks at numbers of tokens of which a mask of pairs is about to be made."""


class Redirect(TorchFunctionMode):
    """Sends the attention of modules inside a door to `ContextAttention`, and gives ranks their own dropout there.

    Everything else runs straight through. Not installed unless a door is open.

    Args:
        attention: The attention over all ranks' tokens.
        tensor_size: Ranks of the tensor axis that share a rank's tokens between them, with sequence parallelism; 1 without.

    Attributes:
        calls: Calls of attention that were redirected so far.
        whole_keys: Calls of attention of the sequence's tokens to keys that are none of it, and need nothing.
        watch: Looks at everything, in a first step.
    """

    def __init__(self, attention: ContextAttention, tensor_size: int = 1) -> None:
        super().__init__()
        self.calls = self.whole_keys = 0
        self.watch: Watch | None = None
        self._attention = attention
        self._random = RandomParts(tensor_size)
        self._masks = GivenMasks()
        self._repeated = RepeatedHeads()
        self._inside: Inside | None = None
        self._handlers: dict[Any, Handler] = {
            **dict.fromkeys(_CALLS, self._product),
            F.multi_head_attention_forward: self._multi_head,
            **dict.fromkeys(_KERNELS, self._kernel),
            **dict.fromkeys(_TRIANGLES, self._triangle),
            **dict.fromkeys(COMPARISONS, self._compare),
            **dict.fromkeys(RepeatedHeads.CALLS, self._repeat),
            **dict.fromkeys(DRAWS, self._draw),
            **dict.fromkeys(LOSSES, self._loss),
        }

    @property
    def is_looking(self) -> bool:
        """Whether it is told of operations that it takes the place of nothing for."""
        return self.watch is not None

    @contextmanager
    def inside(self, inside: Inside) -> Iterator[None]:
        """A context in which calls are redirected: from the cut of a door's arguments until its outputs are shown.

        Args:
            inside: The door. A forward that runs again in backward gives the one of its first run.
        """
        before, self._inside = self._inside, inside
        try:
            with stating_masks(inside):
                # Private; checked with torch 2.13. Entered twice it would redirect what attention itself calls.
                if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
                    yield
                else:
                    with self:
                        yield
        finally:
            self._inside = before
            self._masks.clear()
            self._repeated.clear()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A context inside a door in which nothing is redirected, for code at user level."""
        before, self._inside = self._inside, None
        try:
            with stating_masks(None):
                yield
        finally:
            self._inside = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, or what takes its place."""
        handler = self._handlers.get(func)
        if handler is None and self.watch is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if torch.compiler.is_compiling() and (
            func in _NOTED or (func in DROPOUT and not is_active(args, kwargs or {}))
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._handled(func, handler, args, kwargs or {})

    # Compiled code breaks here: what goes to other ranks runs as it is, with everything else compiled on both sides.
    @torch.compiler.disable(reason="attention of all ranks of the context axis")  # type: ignore[no-untyped-call,untyped-decorator]
    def _handled(self, func: Any, handler: Handler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = None if self._inside is None or self._inside.paused else self._inside
        output = func(*args, **kwargs) if handler is None or inside is None else handler(func, args, kwargs)
        if self.watch is not None and inside is not None:
            self.watch.look(inside, func, args, kwargs, output)
        return output

    @property
    def _open(self) -> Inside:
        if self._inside is None:
            raise RuntimeError("No door is open.")
        return self._inside

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Masks are kept for the layers that follow, and a ring does not do the same on each rank.
        with hidden_operations():
            return self._attend(*args, **kwargs)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = answer_loss(self._open, func, args, kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        inside = self._open
        if not _meets(inside, query.shape[-2], key.shape[-2], attn_mask, is_causal):
            # Keys that are no part of the sequences are whole, and each query sees all it has to.
            self.whole_keys += query.shape[-2] == inside.sequence.cut.local
            return _PRODUCT(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if isinstance(query, FakeTensor):
            # Somebody runs the layer without values, to see its shapes: there is nothing to send.
            return _PRODUCT(query, key, value, scale=scale, enable_gqa=enable_gqa)
        if dropout_p:
            raise refused(
                inside,
                f"drops {dropout_p:g} of its attention's probabilities (dropout_p={dropout_p:g})",
                "Attention over several ranks has no dropout: set it to 0 (attention_dropout=0, attn_pdrop=0 or"
                " attention_probs_dropout_prob=0 in the config of a Hugging Face model); dropout elsewhere may stay.",
            )
        if attn_mask is not None and is_causal:
            raise ValueError(
                "attn_mask must not be given with is_causal=True; one of them has to say what queries see."
            )
        mask = self._mask(inside, query, attn_mask, is_causal)
        if inside.limits is not None:
            mask = inside.limits.on(mask)
        if self.watch is not None:
            self.watch.attended(inside, query, key)
        single = self._repeated.undone(key), self._repeated.undone(value)
        if single[0].shape[1:2] == single[1].shape[1:2]:
            key, value = single
        self.calls += 1
        return _folded(self._attention, inside, query, key, value, mask, scale)

    def _mask(self, inside: Inside, query: Tensor, given: Tensor | None, is_causal: bool) -> AttentionMask:
        if isinstance(given, StatedMask):
            return given.stated
        if given is None:
            return AttentionMask(is_causal)
        if isinstance(given, PairMask):
            purpose: Purpose = "shows" if given.dtype == torch.bool else "added"
            if (said := stated(inside, given, query.shape[:-2], purpose)) is not None:
                return said
        if isinstance(given, Pairs):
            given = given.plain()
        if query.ndim == 3 and given.ndim == 3:
            given = given.unsqueeze(1)
        reading = self._masks.read(inside, given, query.shape[: max(query.ndim - 3, 1)])
        return AttentionMask(reading.causal, keys=reading.keys)

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.nn.functional.multi_head_attention_forward`, whose own call of attention no mode sees."""
        inside = self._open
        given = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
        query, key = given["query"], given["key"]
        attn_mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
        if not _meets(
            inside, query.shape[0], key.shape[0], attn_mask, given.get("is_causal", False) and attn_mask is None
        ):
            self.whole_keys += query.shape[0] == inside.sequence.cut.local
            return func(*args, **kwargs)
        for name in ("bias_k", "static_k"):
            if given.get(name) is not None:
                raise refused(inside, f"has {name} beside the keys of tokens", "Set add_bias_kv=False.")
        if given.get("add_zero_attn"):
            raise refused(inside, "has a zero beside the keys of tokens", "Set add_zero_attn=False.")
        is_batched = query.ndim == 3
        lead = (query.shape[1],) if is_batched else (1,)
        causal, keys = False, None
        if attn_mask is not None:
            reading = self._masks.read(inside, attn_mask, lead, hides=True)
            causal, keys = reading.causal, reading.keys
        if padding is not None:
            pad = self._masks.read(
                inside, padding[:, None, None] if is_batched else padding[None, None, None], lead, hides=True
            )
            keys = pad.keys if keys is None else keys if pad.keys is None else keys & pad.keys
        mask = AttentionMask(causal, keys=keys)

        def attend(
            q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **rest: Any
        ) -> Tensor:
            stated = StatedMask.of(mask, (1, 1, 1, 1), q.device)
            with hidden_operations():
                return self._attend(q, k, v, stated, dropout_p, **rest)

        output, _ = _multi_head_with(attend)(
            **(given | {"attn_mask": None, "key_padding_mask": None, "is_causal": False, "need_weights": False})
        )
        return output, Untold.of(output) if given.get("need_weights", True) else None

    def _kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, key = args[:2]
        if self._open.sequence.cut.local in (query.shape[-2], key.shape[-2]):
            raise refused(
                self._open, f"calls the kernel {func}", "Call torch.nn.functional.scaled_dot_product_attention."
            )
        return func(*args, **kwargs)

    def _triangle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if x.shape[-1] != self._open.sequence.cut.local or "out" in kwargs:
            return result
        return made(func, x, result, kwargs.get("diagonal", args[1] if len(args) > 1 else 0))

    def _compare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside, watch = self._open, self.watch
        show = None if watch is None else partial(watch.compared, inside)
        found = compared(inside, func, args, kwargs, show)
        return func(*args, **kwargs) if found is None else found

    def _repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self._repeated.note(func, args, kwargs, result)
        return result

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._random.draw(self._open, func, args, kwargs)


# What is asked of a tensor that is passed on, by whoever watches the first step too.
_ASKING = frozenset(
    ["__get__", "__repr__", "dim", "detach", "numel", "size", "stride", "untyped_storage", "storage_offset", "is_floating_point"]
)  # fmt: skip


class Untold(Tensor):
    """Attention's weights, which no rank has: whoever uses them is told so."""

    @classmethod
    def of(cls, like: Tensor) -> Untold:
        """Such weights on the device of a tensor."""
        return torch.empty(0, device=like.device).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses."""
        if getattr(func, "__name__", "") in _ASKING:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            "The weights of an attention over a sequence that no rank holds whole (need_weights=True of torch.nn.MultiheadAttention) are"
            " not computed with ContextParallel. Use its first output alone."
        )


def _meets(inside: Inside, queries: int, keys: int, attn_mask: Any, is_causal: bool) -> bool:
    """Whether a call of attention is one over the tokens of the sequence, of which each rank has a part."""
    cut = inside.sequence.cut
    if keys == cut.local and queries == cut.local:
        return True
    if keys == cut.local:
        raise refused(
            inside,
            f"has {queries} queries for {keys} keys of a sequence that is cut",
            "Queries have to be all tokens of the sequence, as many as keys, or the keys something that is whole.",
        )
    if queries != cut.local:
        return False
    if is_causal or isinstance(attn_mask, StatedMask):
        raise refused(
            inside,
            f"has causal attention of its tokens to {keys} keys",
            "Causal attention has to be that of a sequence to itself.",
        )
    if attn_mask is not None and attn_mask.ndim > 1 and attn_mask.shape[-2] > 1 and attn_mask.stride(-2):
        raise refused(
            inside,
            f"has a mask {tuple(attn_mask.shape)} of its tokens and {keys} keys that are not the sequence's",
            "Give such a mask one row for all queries, (B, 1, 1, keys).",
        )
    return False


def _folded(
    attention: ContextAttention,
    inside: Inside,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float | None,
) -> Tensor:
    """Attention with any dimensions before those of heads, tokens and features, in the dtype of autocast, with any size of values."""
    device = query.device.type
    casts = torch.is_autocast_enabled(device)
    if casts:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) if x.dtype != torch.float64 else x for x in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"Queries, keys and values of attention have to have one dtype, not {query.dtype}, {key.dtype} and {value.dtype}."
        )
    shape, scale = query.shape, default_scale(query.shape[-1], scale)
    q, k, v = _four(query, None), _four(key, query), _four(value, query)
    if k.shape[1] != v.shape[1]:
        heads = max(k.shape[1], v.shape[1])
        k, v = (x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x for x in (k, v))
    size, features = v.shape[-1], q.shape[-1]
    if size < features:
        v = F.pad(v, (0, features - size))
    elif size > features:
        q, k = F.pad(q, (0, size - features)), F.pad(k, (0, size - features))
    with torch.autocast(device, enabled=False), shared_attention(q, k, v, inside.sequence.cut.size):
        out = attention(q, k, v, mask, inside.sequence.cut, scale)
    return out[..., :size].reshape(*shape[:-1], size)


def _four(x: Tensor, query: Tensor | None) -> Tensor:
    """(B, H, s, D) of something with any number of dimensions before the last two."""
    if x.ndim == 3:
        x = x.unsqueeze(1)
    if query is not None:
        lead = query.shape[: max(query.ndim - 3, 1)]
        if x.shape[:-3] != lead:
            x = x.expand(*lead, *x.shape[-3:])
    return x if x.ndim == 4 else x.reshape(prod(x.shape[:-3]), *x.shape[-3:])


def _multi_head_with(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function of torch, with another attention inside."""
    # Modes do not see what a function of torch calls itself. Its names are looked up where it was made; checked with torch 2.13.
    names = F.__dict__ | {"scaled_dot_product_attention": attend, "has_torch_function": lambda _: False}
    func = F.multi_head_attention_forward
    return FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)


_MULTI_HEAD = F.multi_head_attention_forward.__code__.co_varnames[: F.multi_head_attention_forward.__code__.co_argcount]
