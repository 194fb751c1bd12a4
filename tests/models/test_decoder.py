import pytest
import torch
import torch.nn.functional as F

from lightning_5d.expert_parallel.moe import MoE
from lightning_5d.models import PRESETS, Decoder, DecoderConfig
from lightning_5d.models.decoder import sample_token


def tiny(**changes):
    return DecoderConfig.preset("tiny", **{"vocab_size": 13, **changes})


def tokens(*shape, vocab_size=13, seed=0):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_and_gradients_equal_hugging_face_llama(tie, kv_heads):
    transformers = pytest.importorskip("transformers")
    config = tiny(tie_embeddings=tie, num_kv_heads=kv_heads, rope_theta=5000.0, norm_eps=1e-4, initializer_std=0.3)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=tie,
            attention_bias=False,
        )
    )
    torch.manual_seed(1)
    decoder = Decoder(config)
    theirs = {(name if name == "lm_head.weight" else f"model.{name}"): p for name, p in decoder.state_dict().items()}
    missing = llama.load_state_dict(theirs, strict=False)
    assert not missing.missing_keys
    assert not missing.unexpected_keys

    ids, labels = tokens(2, 9), tokens(2, 9, seed=1)
    ours, reference = decoder(ids), llama(input_ids=ids).logits
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    F.cross_entropy(ours.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(reference.flatten(0, 1), labels.flatten()).backward()
    gradients = dict(llama.named_parameters())
    for name, parameter in decoder.named_parameters():
        expected = gradients[name if name == "lm_head.weight" else f"model.{name}"].grad
        torch.testing.assert_close(
            parameter.grad, expected, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_a_later_token_does_not_change_earlier_logits():
    decoder, ids = Decoder(tiny()), tokens(1, 8)
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 13
    before, after = decoder(ids), decoder(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=0, rtol=0)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).gt(0).all()


def test_position_ids_default_to_counting_from_zero_and_only_distances_matter():
    decoder, ids = Decoder(tiny(initializer_std=0.3)), tokens(2, 8)
    counted = decoder(ids)
    torch.testing.assert_close(decoder(ids, torch.arange(8)[None].expand(2, -1)), counted, atol=0, rtol=0)
    torch.testing.assert_close(decoder(ids, torch.arange(100, 108)[None]), counted, atol=1e-4, rtol=1e-4)
    stretched = decoder(ids, 3 * torch.arange(8)[None])
    assert (stretched - counted).abs().max() > 1e-2


def test_a_meta_device_model_is_filled_module_by_module():
    with torch.device("meta"):
        decoder = Decoder(tiny(tie_embeddings=False))
    for module in decoder.modules():
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                parameter.detach().fill_(float("nan"))
            module.reset_parameters()
    for name, value in decoder.state_dict().items():
        assert value.isfinite().all(), name
        assert value.std() > 0 or (value == 1).all(), name
    assert decoder(tokens(1, 4)).isfinite().all()


def test_weights_start_at_the_configured_standard_deviation():
    config = DecoderConfig(num_layers=2, initializer_std=0.05)
    decoder = Decoder(config)
    assert decoder.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert decoder.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert decoder.layers[0].mlp.down_proj.weight.std().item() == pytest.approx(0.05 / 2, rel=0.02)


def test_tied_embeddings_are_one_parameter():
    tied, untied = Decoder(tiny()), Decoder(tiny(tie_embeddings=False))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 13 * 16


def test_greedy_generation_follows_the_likeliest_token():
    decoder, start = Decoder(tiny(initializer_std=0.5)), tokens(2, 3)
    generated = decoder.generate(start, 5, temperature=0)
    assert generated.shape == (2, 8)
    assert generated[:, :3].equal(start)
    expected = decoder(generated)[:, 2:-1].argmax(-1)
    assert generated[:, 3:].equal(expected)
    assert decoder.generate(start, 5, top_k=1).equal(generated)


def test_generation_depends_on_its_generator_only():
    decoder, start = Decoder(tiny()), tokens(1, 3)
    first, again, other = (
        decoder.generate(start, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)


def test_generation_looks_back_no_further_than_the_context():
    decoder = Decoder(tiny(context_length=4, initializer_std=0.5))
    long, short = tokens(1, 9), tokens(1, 9)[:, -4:]
    assert decoder.generate(long, 1, temperature=0)[:, -1].equal(decoder.generate(short, 1, temperature=0)[:, -1])


def test_sampled_frequencies_are_the_softmax_at_that_temperature():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    drawn = sample_token(logits.expand(40_000, 4), 0.5, None, torch.Generator().manual_seed(0)).flatten()
    shares = drawn.bincount(minlength=4) / len(drawn)
    torch.testing.assert_close(shares, (logits / 0.5).softmax(0), atol=0.01, rtol=0)
    drawn = sample_token(logits.expand(40_000, 4), 1.0, 2, torch.Generator().manual_seed(0)).flatten()
    assert set(drawn.tolist()) == {0, 3}


@pytest.mark.parametrize(
    ("start", "settings"), [((1, 0), {}), ((3,), {}), ((1, 2), {"temperature": -1.0}), ((1, 2), {"top_k": 0})]
)
def test_generation_refuses_what_it_cannot_do(start, settings):
    with pytest.raises(ValueError, match="at least"):
        Decoder(tiny()).generate(tokens(*start), 2, **settings)


def test_wrong_sizes_are_all_named_with_what_would_work():
    with pytest.raises(ValueError) as error:
        DecoderConfig(hidden_size=100, num_heads=8, num_kv_heads=3)
    assert "hidden_size 100" in str(error.value)
    assert "hidden_size 96 does" in str(error.value)
    assert "num_kv_heads 3 does not divide num_heads 8" in str(error.value)
    assert "1, 2, 4, 8" in str(error.value)
    with pytest.raises(ValueError) as error:
        DecoderConfig(num_layers=0, vocab_size=-1)
    assert "num_layers is 0" in str(error.value)
    assert "vocab_size is -1" in str(error.value)


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ValueError, match=r"'huge'.*demo, medium, moe_tiny, small, tiny"):
        DecoderConfig.preset("huge")
    assert all(DecoderConfig.preset(name) for name in PRESETS)


EXPERTS = {"experts": 4, "top_k": 2, "intermediate_size": 24}


def test_with_experts_logits_and_gradients_equal_hugging_face_mixtral():
    transformers = pytest.importorskip("transformers")
    config = tiny(tie_embeddings=False, rope_theta=5000.0, initializer_std=0.3, moe=EXPERTS)
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=24,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            num_local_experts=4,
            num_experts_per_tok=2,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    torch.manual_seed(1)
    decoder = Decoder(config)

    def theirs(name):
        return name if name == "lm_head.weight" else f"model.{name}"

    mixtral.load_state_dict({theirs(name): value for name, value in decoder.state_dict().items()})
    ids, labels = tokens(2, 9), tokens(2, 9, seed=1)
    ours, reference = decoder(ids), mixtral(input_ids=ids).logits
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    F.cross_entropy(ours.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(reference.flatten(0, 1), labels.flatten()).backward()
    for name, parameter in decoder.named_parameters():
        expected = mixtral.get_parameter(theirs(name)).grad
        torch.testing.assert_close(
            parameter.grad, expected, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_losses_of_experts_are_added_up_over_the_layers_that_have_them():
    config = tiny(num_layers=3, dense_layers=1, initializer_std=0.3, moe=EXPERTS | {"balance": 0.1, "z": 0.2})
    decoder, single = Decoder(config), []
    assert [isinstance(layer.mlp, MoE) for layer in decoder.layers] == [False, True, True]
    for layer in decoder.layers[1:]:
        layer.mlp.register_forward_hook(lambda mlp, args, output: single.append(output[1]))
    output = decoder(tokens(2, 9))
    assert list(output.losses) == ["balance", "z"]
    for name, loss in output.losses.items():
        torch.testing.assert_close(loss, single[0][name] + single[1][name])
        assert loss > 0
    without = Decoder(tiny(num_layers=3, dense_layers=1, moe=EXPERTS))
    without.load_state_dict(decoder.state_dict())
    torch.testing.assert_close(without(tokens(2, 9)), output.logits, atol=0, rtol=0)


def test_with_experts_it_generates_the_same_whether_or_not_they_have_losses():
    torch.manual_seed(0)
    decoder = Decoder(tiny(initializer_std=0.5, moe=EXPERTS | {"balance": 0.1})).eval()
    without = Decoder(tiny(initializer_std=0.5, moe=EXPERTS)).eval()
    without.load_state_dict(decoder.state_dict())
    generated = decoder.generate(tokens(2, 3), 5, temperature=0)
    assert generated.shape == (2, 8)
    assert generated.equal(without.generate(tokens(2, 3), 5, temperature=0))


@pytest.mark.parametrize(
    ("changes", "feed_forward"),
    [
        ({}, {"mlp"}),
        ({"moe": EXPERTS}, set()),
        ({"moe": EXPERTS | {"shared": 1}}, {"mlp.shared_experts"}),
        ({"moe": EXPERTS | {"shared": 1}, "dense_layers": 1}, {"mlp", "mlp.shared_experts"}),
        ({"moe": EXPERTS, "dense_layers": 2}, {"mlp"}),
    ],
)
def test_the_plan_names_layers_that_there_are(changes, feed_forward):
    decoder = Decoder(tiny(**changes))
    names = {name.replace(f".{i}.", ".*.") for name, _ in decoder.named_modules() for i in (0, 1)}
    assert set(decoder.parallel_plan) <= names
    assert {name[9:-10] for name in decoder.parallel_plan if name.endswith("gate_proj")} == feed_forward


def test_a_decoder_with_experts_is_filled_module_by_module_too():
    with torch.device("meta"):
        decoder = Decoder(tiny(moe=EXPERTS | {"bias_rate": 0.1, "shared": 1, "shared_gate": True}))
    for module in decoder.modules():
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    assert all(value.isfinite().all() for value in decoder.state_dict().values())
    assert decoder.layers[0].mlp.gate.expert_bias.equal(torch.zeros(4))
    assert decoder.layers[0].mlp.gate.load.equal(torch.zeros(4, dtype=torch.int64))
    assert decoder(tokens(1, 4)).isfinite().all()


def test_what_is_wrong_with_experts_is_named_together_with_all_else():
    with pytest.raises(ValueError) as error:
        tiny(hidden_size=18, dense_layers=3, moe={"experts": 2, "top_k": 3})
    for part in ("hidden_size 18", "dense_layers is 3, of 2 layers; 2 is the nearest", "top_k 3 is more than the 2"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="no setting 'expert'; did you mean 'experts'"):
        tiny(moe={"expert": 2})
