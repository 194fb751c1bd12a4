import json

import numpy as np
import pytest

from lightning_5d.data import TokenFile, tokenize_files
from lightning_5d.data.token_file import sidecar_path, write_token_file

SMALL = {"sequence_length": 4, "batch_size": 1, "val_fraction": 0.25}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ids.bin"
    write_token_file(path, [range(50), range(50)], vocab_size=50, text_bytes=400, tokenizer=None)
    return path


def message(data):
    with pytest.raises(ValueError) as error:
        data.check()
    return str(error.value)


def edit_sidecar(path, **changes):
    sidecar_path(path).write_text(json.dumps(json.loads(sidecar_path(path).read_text()) | changes))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_ids_come_back_as_they_were_written_in_the_smallest_type(tmp_path, vocab_size, dtype):
    ids = [0, 1, vocab_size - 1] * 20
    sidecar = write_token_file(tmp_path / "a.bin", [ids], vocab_size=vocab_size, text_bytes=None, tokenizer=None)
    assert (sidecar.dtype, sidecar.count) == (dtype, 60)
    data = TokenFile(tmp_path / "a.bin", vocab_size=vocab_size, **SMALL)
    train, val = data.tokens
    assert train.tolist() + val.tolist() == ids
    assert isinstance(train, np.memmap)
    assert not train.flags.writeable
    assert data.bytes_per_token is None
    assert data.train_dataloader().dataset[0]["input_ids"].tolist() == ids[:4]


def test_bytes_per_token_come_from_the_sidecar(path):
    data = TokenFile(path, vocab_size=50, **SMALL)
    data.check()
    assert data.bytes_per_token == 4.0


def test_a_missing_file_or_sidecar_is_named(tmp_path, path):
    assert f"{str(tmp_path / 'no.bin')!r}, which is no file" in message(TokenFile(tmp_path / "no.bin", **SMALL))
    sidecar_path(path).unlink()
    said = message(TokenFile(path, vocab_size=50, **SMALL))
    assert "ids.bin.json' is missing" in said
    assert "fived tokenize" in said


def test_an_odd_length_is_refused_with_the_length_it_should_have(path):
    path.write_bytes(path.read_bytes()[:-1])
    said = message(TokenFile(path, vocab_size=50, **SMALL))
    assert "199 bytes, which is not a multiple of the 2 bytes of uint16" in said
    assert "100 tokens take 200 bytes" in said


def test_a_size_that_disagrees_with_the_sidecar_is_refused_with_both(path):
    path.write_bytes(path.read_bytes()[:-20])
    said = message(TokenFile(path, vocab_size=50, **SMALL))
    assert "180 bytes, that is 90 tokens" in said
    assert "count 100, that is 200 bytes" in said


def test_an_empty_file_is_refused(path):
    path.write_bytes(b"")
    assert "ids.bin' is empty" in message(TokenFile(path, vocab_size=50, **SMALL))


def test_everything_wrong_in_a_sidecar_is_listed(path):
    edit_sidecar(path, dtype="int8", vocab_size=0, count="many")
    said = message(TokenFile(path, vocab_size=50, **SMALL))
    assert "dtype is 'int8'; it must be one of uint16, uint32" in said
    assert "vocab_size is 0" in said
    assert "count is 'many'" in said
    sidecar_path(path).write_text("[1, 2")
    assert "is not JSON" in message(TokenFile(path, vocab_size=50, **SMALL))
    sidecar_path(path).write_text("[1, 2]")
    assert "holds a list instead of an object" in message(TokenFile(path, vocab_size=50, **SMALL))


def test_an_id_beyond_the_vocabulary_is_named_with_its_place_and_the_size_that_works(path):
    edit_sidecar(path, vocab_size=40)
    said = message(TokenFile(path, vocab_size=40, **SMALL))
    assert "token 40 has id 40, but the vocab_size is 40" in said
    assert "the highest id is 49" in said
    assert "50 or more" in said
    assert not TokenFile(path, vocab_size=40, check_ids=False, **SMALL).problems()


def test_a_model_with_too_small_a_vocabulary_is_refused_with_both_sizes(path):
    said = message(TokenFile(path, vocab_size=30, **SMALL))
    assert "the file's vocab_size is 50, the model's 30" in said
    assert "model.decoder.vocab_size=50" in said


def test_an_interrupted_write_leaves_no_token_file(tmp_path):
    def broken():
        yield [1, 2]
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_token_file(tmp_path / "a.bin", broken(), vocab_size=9, text_bytes=None, tokenizer=None)
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_does_not_fit_the_type_is_refused_and_not_wrapped(tmp_path):
    with pytest.raises(OverflowError):
        write_token_file(tmp_path / "a.bin", [[1, 70_000]], vocab_size=9, text_bytes=None, tokenizer=None)


def test_tokenizing_bytes_gives_the_text_back(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("naïve " * 5)
    (tmp_path / "text" / "b.txt").write_text("second")
    sidecar = tokenize_files(tmp_path / "text", tmp_path / "out.bin", "byte")
    data = TokenFile(tmp_path / "out.bin", **SMALL)
    text = data.decode([token for part in data.tokens for token in part.tolist()])
    assert text == "naïve " * 5 + "\n\nsecond"
    assert sidecar.vocab_size == 256
    assert data.bytes_per_token == 1.0


def test_tokenizing_with_a_hugging_face_tokenizer_gives_the_text_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "</s>", "one", "two", "three", "and"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="</s>").save_pretrained(
        tmp_path / "tokenizer"
    )
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one and two " * 4)
    (tmp_path / "text" / "b.txt").write_text("three and one")
    tokenize_files(tmp_path / "text", tmp_path / "out.bin", str(tmp_path / "tokenizer"))
    data = TokenFile(tmp_path / "out.bin", vocab_size=6, **{**SMALL, "sequence_length": 2})
    ids = [token for part in data.tokens for token in part.tolist()]
    assert ids == [2, 5, 3] * 4 + [1] + [4, 5, 2]
    assert data.decode(ids[:3]) == "one and two"
    assert data.bytes_per_token == (48 + 13) / 16


def test_tokenizing_names_every_problem_at_once(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "text" / "b.txt").touch()
    with pytest.raises(ValueError) as error:
        tokenize_files(tmp_path / "text", tmp_path / "no" / "out.bin", "no-such-tokenizer")
    for part in ("byte 0xff at offset 3", "b.txt' is empty", "no', does not exist", "'no-such-tokenizer'"):
        assert part in str(error.value)


def test_an_existing_output_is_kept_unless_forced(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists; name another file or pass --force"):
        tokenize_files(tmp_path / "a.txt", tmp_path / "out.bin", "byte")
    assert (tmp_path / "out.bin").read_bytes() == b"mine"
    tokenize_files(tmp_path / "a.txt", tmp_path / "out.bin", "byte", overwrite=True)
    assert (tmp_path / "out.bin").read_bytes() == b"t\0e\0x\0t\0"


def test_without_transformers_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ImportError, match=r"lightning-5d\[hf\]"):
        tokenize_files(tmp_path / "a.txt", tmp_path / "out.bin", str(tmp_path))
