"""How an exception is told to the other ranks."""

import pytest

from lightning_5d.launch.failure import Failure


def _raised(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("notes", [(), ("It was in the experts.",), ("two\nlines", "and more")], ids=len)
def test_the_headline_is_the_error_and_not_what_was_noted_beside_it(notes: tuple[str, ...]) -> None:
    failure = Failure.of(3, _raised(ValueError("the planned failure"), *notes))
    assert failure.what == "raised ValueError: the planned failure"
    assert all(note in failure.traceback for note in notes)


def test_a_syntax_error_is_told_by_its_last_line() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("a b", "file.py", "exec")
    assert Failure.of(0, caught.value).what == "raised SyntaxError: invalid syntax"
