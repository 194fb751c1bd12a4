import pytest

from lightning_5d.data import PythonDocs, TextFiles

SMALL = {"sequence_length": 4, "batch_size": 1, "val_fraction": 0.25}


def message(data):
    with pytest.raises(ValueError) as error:
        data.check()
    return str(error.value)


def text_of(data):
    return bytes(token for part in data.tokens for token in part.tolist())


def test_a_file_is_its_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("naïve ☃ and more than one window")
    data = TextFiles(path, **SMALL)
    assert text_of(data) == path.read_bytes()
    assert data.bytes_per_token == 1.0
    assert data.decode(data.encode("naïve ☃")) == "naïve ☃"


def test_a_folder_is_its_files_by_path_with_an_empty_line_between(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"\xff hidden")
    (tmp_path / "b" / "two.txt").write_text("second text")
    (tmp_path / "a.txt").write_text("first text")
    (tmp_path / "c.md").write_text("third text")
    assert text_of(TextFiles(tmp_path, **SMALL)) == b"first text\n\nsecond text\n\nthird text"
    assert text_of(TextFiles(tmp_path, pattern="**/*.txt", **SMALL)) == b"first text\n\nsecond text"


def test_the_python_documentation_is_english_text_of_some_size():
    data = PythonDocs()
    train, val = data.tokens
    assert len(train) + len(val) > 300_000
    assert len(val) == pytest.approx(0.1 * (len(train) + len(val)), abs=1)
    assert 4.3 < data.unigram_entropy() < 5.0
    assert b"The " in train.tobytes()


def test_a_missing_path_is_named_with_the_nearest_folder(tmp_path):
    said = message(TextFiles(tmp_path / "no" / "where.txt", **SMALL))
    assert repr(str(tmp_path / "no" / "where.txt")) in said
    assert "does not exist" in said
    assert f"nearest folder that exists is {str(tmp_path)!r}" in said


def test_an_empty_file_and_an_empty_folder_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    assert f"{str(tmp_path / 'empty.txt')!r} is empty" in message(TextFiles(tmp_path / "empty.txt", **SMALL))
    (tmp_path / "folder").mkdir()
    assert "holds no file that matches '**/*'" in message(TextFiles(tmp_path / "folder", **SMALL))


def test_what_is_not_utf8_is_named_with_file_byte_and_offset(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("as naïve as ever".encode("latin-1"))
    said = message(TextFiles(path, **SMALL))
    assert repr(str(path)) in said
    assert "byte 0xef at offset 5" in said
    assert "iconv" in said


def test_a_text_shorter_than_a_window_is_refused_with_the_length_that_fits(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 40)
    said = message(TextFiles(path, sequence_length=16, val_fraction=0.25))
    assert "40 tokens split into 30 for training and 10 for validation" in said
    assert "one window of 16 + 1" in said
    assert "sequence_length of at most 9" in said
    assert not TextFiles(path, sequence_length=9, val_fraction=0.25, batch_size=1).problems()


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 1.5, float("nan")])
def test_a_validation_fraction_outside_0_and_1_is_refused(tmp_path, fraction):
    (tmp_path / "text.txt").write_text("x" * 100)
    said = message(TextFiles(tmp_path / "text.txt", sequence_length=4, val_fraction=fraction))
    assert f"val_fraction is {fraction}" in said
    assert "between 0 and 1" in said


def test_all_problems_come_in_one_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").touch()
    (tmp_path / "c.txt").write_text("fine")
    said = message(
        TextFiles(tmp_path, sequence_length=0, batch_size=-1, val_fraction=2, vocab_size=100, num_workers=-1)
    )
    for part in (
        "sequence_length is 0",
        "batch_size is -1",
        "val_fraction is 2",
        "vocab_size is 100; bytes need 256",
        "num_workers is -1",
        "a.txt' is not UTF-8: byte 0xff at offset 0",
        "b.txt' is empty",
    ):
        assert part in said
    assert said.count("\n  - ") == 7


def test_setup_refuses_before_any_training(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        TextFiles(tmp_path / "nowhere", **SMALL).setup("fit")
