"""Hugging Face's models inside a door see of all tokens what they see in one process."""

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.cut import Balance
from lightning_5d.context_parallel.first_step import FirstStep
from lightning_5d.context_parallel.hugging_face_masks import Pattern, pattern_of
from lightning_5d.context_parallel.hugging_face_models import hugging_face_problems
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.stated_mask import StatedMask
from tests.context_parallel.by_gathering import HandMadeDoor, Mirrored, difference_from_one_process
from tests.ranks.pool import RankPool

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
BATCH = 2


def decoders() -> Iterator[tuple[str, nn.Module]]:
    import transformers as hf

    torch.manual_seed(0)
    yield "Llama", hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    yield "Qwen3", hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8))
    for window in (2, 5, 12):  # shorter than a rank's part, and longer
        yield f"Mistral {window}", hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=window))
    yield "Mixtral", hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4))
    gemma = hf.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    )
    yield "Gemma3", hf.Gemma3ForCausalLM(gemma)
    yield "Phi3", hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED, pad_token_id=0))
    gpt2 = hf.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    yield "GPT2", hf.GPT2LMHeadModel(gpt2)
    yield "GPTNeoX", hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, hidden_dropout=0, attention_dropout=0))
    yield "OLMo2", hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED))
    yield "Cohere", hf.CohereForCausalLM(hf.CohereConfig(**GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    llama4 = hf.Llama4TextConfig(
        **GROUPED, head_dim=8, num_local_experts=2, attention_chunk_size=5, intermediate_size_mlp=24
    )
    yield "Llama4", hf.Llama4ForCausalLM(llama4)


def encoders() -> Iterator[tuple[str, nn.Module]]:
    import transformers as hf

    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    yield "BERT", hf.BertForMaskedLM(hf.BertConfig(**SIZES, **off))
    yield "RoBERTa", hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES, **off, pad_token_id=1))
    distil = hf.DistilBertConfig(
        vocab_size=40, dim=16, n_layers=2, n_heads=4, hidden_dim=24, dropout=0, attention_dropout=0
    )
    yield "DistilBERT", hf.DistilBertForMaskedLM(distil)
    modern = hf.ModernBertConfig(
        **SIZES, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1, sep_token_id=2
    )
    yield "ModernBERT", hf.ModernBertForMaskedLM(modern)


def models() -> Iterator[tuple[str, nn.Module]]:
    yield from decoders()
    yield from encoders()


def padding(length: int) -> dict[str, Tensor]:
    masks = {kind: torch.ones(BATCH, length, dtype=torch.long) for kind in ("ones", "right", "left")}
    masks["right"][0, length - 5 :] = 0
    masks["left"][1, :3] = 0
    return masks


def positions(name: str, of: Tensor) -> Tensor:
    return of + 2 if name == "RoBERTa" else of  # as its own count begins


def _parity(rank: int, balance: Balance, length: int, watched: bool) -> dict[str, float]:
    warnings.simplefilter("ignore")
    door = HandMadeDoor(length, balance)
    ids = torch.randint(3, 40, (BATCH, length), generator=torch.Generator().manual_seed(1))
    packed = torch.cat([torch.arange(6), torch.arange(length - 6)]).repeat(BATCH, 1)
    packed[1] = torch.cat([torch.arange(3), torch.arange(length - 4), torch.arange(1)])
    documents = (packed.diff(prepend=packed[:, :1] - 1) != 1).cumsum(-1)
    found = {}
    for name, model in models():
        local = {"position_ids": positions(name, door.sequence.positions(ids.device))}
        takes = inspect.signature(model.forward).parameters
        found[name] = difference_from_one_process(door, model, input_ids=ids, extra=local)
        for kind, mask in padding(length).items():
            found[f"{name} {kind}"] = difference_from_one_process(
                door, model, input_ids=ids, attention_mask=mask, extra=local
            )
        # With a cache, as these models have without being asked, Hugging Face looks for no documents.
        for cached in (True, False) if "use_cache" in takes else (None,):
            if cached is False and name == "Llama4":
                continue
            given = {} if cached is None else {"use_cache": cached}
            found[f"{name} packed {cached}"] = difference_from_one_process(
                door, model, documents, input_ids=ids, position_ids=positions(name, packed), **given
            )
        if watched:
            with FirstStep(model, door.redirect).watching("train"):
                door(model, input_ids=ids, **local, attention_mask=padding(length)["left"])
    door.close()
    return found


@pytest.mark.parametrize(("balance", "length", "watched"), [("zigzag", 16, True), ("contiguous", 15, False)])
def test_masks_windows_padding_and_packed_documents_are_those_of_the_whole_sequence(
    ranks: RankPool, balance: Balance, length: int, watched: bool
) -> None:
    for found in ranks(2, _parity, balance, length, watched, timeout=90):
        assert len(found) > 90
        assert {name: value for name, value in found.items() if not value < 1e-5} == {}


@pytest.mark.parametrize("length", [8, 32])  # as many tokens of a rank as heads, or as features
def test_no_model_is_refused_for_sizes_that_happen_to_be_alike(length: int) -> None:
    ids = torch.randint(3, 40, (length // 2, length))
    for name, model in models():
        door = HandMadeDoor(length, axis=Mirrored())
        local = {"position_ids": positions(name, door.sequence.positions(ids.device))}
        guards = FirstStep(model, door.redirect)
        with torch.no_grad(), guards.watching("train"):
            door(model, input_ids=ids, **local)
        with torch.no_grad(), pytest.raises(MisconfigurationException, match=r"counts|mixes"), guards.watching("other"):
            door(model, input_ids=ids)


def _llama(**changes: Any) -> nn.Module:
    import transformers as hf

    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **changes))


def test_masks_are_made_as_ever_outside_of_doors_and_after_them() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    attention = pytest.importorskip("transformers.integrations.sdpa_attention")
    before = masks.find_packed_sequence_indices, attention.use_gqa_in_sdpa, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    door = HandMadeDoor(8, axis=Mirrored())
    with door.redirect.inside(door.inside()):
        assert masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not before[2]
        with door.redirect.outside():
            inner = (
                masks.find_packed_sequence_indices,
                attention.use_gqa_in_sdpa,
                masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
            )
            assert inner == before
        assert masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not before[2]
    after = masks.find_packed_sequence_indices, attention.use_gqa_in_sdpa, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert after == before


def test_key_and_value_heads_are_not_repeated_before_they_are_sent() -> None:
    door = HandMadeDoor(8, axis=Mirrored())
    mask = torch.ones(BATCH, 8, dtype=torch.long)
    mask[0, 1] = 0
    door(_llama(), input_ids=torch.ones(BATCH, 8, dtype=torch.long), attention_mask=mask)
    assert door.attention.heads == [(4, 2)] * 2
    one, other = door.attention.masks
    assert one.keys is not None
    assert one.keys is other.keys


def test_patterns_are_read() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(4)
    documents = torch.zeros(1, 4)
    assert pattern_of(causal) == Pattern(causal=True)
    assert pattern_of(window) == Pattern(causal=True, window=4)
    assert pattern_of(masks.sliding_window_bidirectional_mask_function(4)) == Pattern(window=5)
    packed = masks.and_masks(
        masks.remap_positions_for_packed_sequence(window, documents), masks.packed_sequence_mask_function(documents)
    )
    assert pattern_of(packed) == Pattern(causal=True, window=4, packed=True)
    assert pattern_of(masks.chunked_causal_mask_function(3, documents)) == Pattern(causal=True, chunk=3)
    blocks = masks.or_masks(causal, masks.blockwise_overlay(documents))
    assert "block_sequence_ids" in str(pattern_of(blocks).unknown)
    assert "or_mask_function" in str(pattern_of(masks.or_masks(causal, causal)).unknown)
    assert "own" in str(pattern_of(lambda b, h, q, k: q == k).unknown)


def test_masks_of_the_users_own_are_refused_by_name() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    model = _llama()
    door = HandMadeDoor(8, axis=Mirrored())
    embeds = torch.zeros(BATCH, 4, 16)
    arguments = {"config": model.config, "inputs_embeds": embeds, "attention_mask": None, "cache": None}
    with door.redirect.inside(door.inside()):
        with pytest.raises(MisconfigurationException, match=r"and_mask|own"):
            masks.create_causal_mask(**arguments, and_mask_function=lambda b, h, q, k: q == k)
        with pytest.raises(MisconfigurationException, match="block_sequence_ids"):
            masks.create_causal_mask(**arguments, block_sequence_ids=torch.zeros(BATCH, 4))
    whole = torch.ones(BATCH, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(
        MisconfigurationException, match=re.compile(r"self_attn.*mask \(2, 1, 4, 4\).*4 of 8", re.DOTALL)
    ):
        door(model, input_ids=torch.ones(BATCH, 8, dtype=torch.long), attention_mask=whole)
    with pytest.raises(MisconfigurationException, match=r"attention_mask \(2, 11\)"):
        door(model, input_ids=torch.ones(BATCH, 8, dtype=torch.long), attention_mask=torch.ones(BATCH, 11))


def test_dropout_of_attention_is_refused_while_training_only() -> None:
    door = HandMadeDoor(8, axis=Mirrored())
    model = _llama(attention_dropout=0.25)
    ids = torch.ones(BATCH, 8, dtype=torch.long)
    with pytest.raises(MisconfigurationException, match=r"layers.0.self_attn.*dropout_p=0.25.*attention_dropout=0"):
        door(model.train(), input_ids=ids)
    door(model.eval(), input_ids=ids)


def test_a_stated_mask_goes_through_what_models_do_and_is_computed_with_by_nobody() -> None:
    stated = AttentionMask(True)
    mask = StatedMask.of(stated, (2, 1, 4096, 4096), "cpu")
    for passed in (
        mask[:, :, :, :4000],
        mask.to(torch.float32),
        mask.contiguous(),
        mask.expand(2, 8, -1, -1),
        mask.clone(),
        mask[:, None, 0],
        mask.detach(),
    ):
        assert isinstance(passed, StatedMask)
        assert passed.stated is stated
        assert passed.untyped_storage().nbytes() <= 4
    assert mask[:, :, :, :4000].shape == (2, 1, 4096, 4000)
    for compute in (
        lambda: mask + 1,
        lambda: torch.where(mask, 1.0, 2.0),
        lambda: torch.zeros(4).masked_fill(mask, 1.0),
    ):
        with pytest.raises(MisconfigurationException, match="computes with its attention mask"):
            compute()


def test_settings_that_cannot_work_are_known_before_the_first_step() -> None:
    import transformers as hf

    def problems(model: nn.Module) -> str:
        return "\n".join(map(str, hugging_face_problems(nn.ModuleDict({"model": model}))))

    for _, model in models():
        assert problems(model) == ""
    assert "attn_implementation='sdpa'" in problems(
        hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED | {"attn_implementation": "eager"}))
    )
    assert "model (Gemma2ForCausalLM) has config._attn_implementation='eager'" in problems(
        hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED | {"attn_implementation": "eager"}, head_dim=8))
    )
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "rope_type='dynamic'" in problems(_llama(rope_parameters=rope))
    t5 = hf.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    assert "bias of relative positions" in problems(hf.T5ForConditionalGeneration(t5))
    assert "ALiBi" in problems(hf.BloomForCausalLM(hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=4)))
    mamba = hf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "mixes tokens outside of attention" in problems(hf.MambaForCausalLM(mamba))


def test_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    door = HandMadeDoor(8, axis=Mirrored())
    with door.redirect.inside(door.inside()):
        pass
    assert "transformers" not in sys.modules
