"""What is counted at the door of experts, how it is kept, and which ranks hold which experts."""

import csv
import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.load import ExpertLoads, choices_per_expert, count_by_hooks
from lightning_5d.expert_parallel.load_chart import draw_loads
from lightning_5d.expert_parallel.load_history import Load, LoadHistory
from lightning_5d.expert_parallel.report import ExpertPlaces, describe_experts
from tests.expert_parallel.routed import Experts

INDEX = torch.tensor([[0, 2], [2, 3], [2, 0], [1, 3]])
CPU = torch.device("cpu")


def described(name: str, experts: int, top_k: int | None = 2) -> FoundExperts:
    return FoundExperts(name, Experts(experts), experts, top_k, ("gate_up_proj", "down_proj"), lambda *_: _[1])


def test_choices_are_counted_of_the_tokens_that_count() -> None:
    assert choices_per_expert(INDEX, 5).tolist() == [2, 1, 3, 2, 0]
    rows = torch.tensor([True, False, True, False])
    assert choices_per_expert(INDEX, 4, rows).tolist() == [2, 0, 2, 0]
    choices = torch.tensor([[True, False], [False, False], [True, True], [False, True]])
    assert choices_per_expert(INDEX, 4, choices).tolist() == [2, 0, 1, 1]
    assert choices_per_expert(INDEX[:0], 3).tolist() == [0, 0, 0]


def test_loads_add_up_until_they_are_taken() -> None:
    loads = ExpertLoads({"a": 4, "b": 2})
    loads["a"].add(torch.tensor([9, 9, 9, 9]))
    loads.counting = True
    assert (list(loads), loads["b"].experts, loads.total) == (["a", "b"], 2, 6)
    kept = torch.ones_like(INDEX, dtype=torch.bool)
    kept[2] = False
    loads["a"].add_choices(INDEX, torch.tensor([True, True, True, False]), kept)
    loads["b"].add(torch.tensor([1, 2]), torch.tensor([0, 1]))
    loads["b"].add(torch.tensor([10, 20]))
    with torch.inference_mode():
        loads["b"].add(torch.tensor([100, 0]))
    assert loads.take(CPU).tolist() == [[2, 0, 3, 1, 111, 22], [1, 0, 1, 0, 0, 1]]
    assert loads.take(CPU).tolist() == [[0] * 6] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_runs_again_counts_once(reentrant: bool) -> None:
    loads = ExpertLoads({"": 4})
    loads.counting = True
    runs = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        loads[""].add_choices(INDEX)
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert len(runs) == 2
    assert loads.take(CPU)[0].tolist() == [2, 1, 3, 2]


def test_hooks_see_indices_however_they_are_given() -> None:
    module = Experts(4)
    loads = ExpertLoads({"experts": 4})
    loads.counting = True
    found = FoundExperts("experts", module, 4, 2, (), lambda *_: _[1])
    (handle,) = count_by_hooks(loads, [found])
    hidden, weights = torch.randn(4, 8), torch.rand(4, 2)
    module(hidden, INDEX, weights)
    module(hidden, weights=weights, index=INDEX)
    assert loads.take(CPU)[0].tolist() == [4, 2, 6, 4]
    module.eval()(hidden, INDEX, weights)
    handle.remove()
    module.train()(hidden, INDEX, weights)
    assert loads.take(CPU)[0].tolist() == [0, 0, 0, 0]


# History


def load(tokens: list[float], dropped: list[float] | None = None, bias: list[float] | None = None) -> Load:
    none = [float("nan")] * len(tokens)
    given = (tokens, dropped or [0.0] * len(tokens), bias or none)
    return Load(*(torch.tensor(values, dtype=torch.float64) for values in given))


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    skewed = load([6, 1, 1, 0], [2, 0, 0, 0], [-0.5, 0.1, 0.1, 0.25])
    assert skewed.imbalance == 3.0
    assert skewed.dropped == 0.25
    assert skewed.bias_spread == 0.75
    assert load([2, 2]).imbalance == 1.0


def test_a_long_history_gets_coarser_and_loses_no_token() -> None:
    history = LoadHistory({"a": 2}, columns=4)
    for step in range(1, 12):
        history.add(step, step, {"a": load([3.0 * step, step], bias=[step, -step])})
    assert [(column.first, column.last) for column in history.columns] == [(1, 4), (5, 8), (9, 11)]
    assert history.series("a").tokens_E.tolist() == [[30, 10], [78, 26], [90, 30]]
    assert history.series("a").bias_E[:, 0].tolist() == [4, 8, 11]
    assert [column.imbalance["a"] for column in history.columns] == pytest.approx([1.5] * 3)


def test_the_imbalance_of_several_steps_is_the_mean_and_not_that_of_the_sum() -> None:
    history = LoadHistory({"a": 2}, columns=2)
    for step, tokens in enumerate(([4, 0], [0, 4], [2, 2], [0, 0]), start=1):
        history.add(step, step, {"a": load(tokens)})
    assert [column.imbalance["a"] for column in history.columns] == [2.0, 1.0]


def test_a_history_goes_on_from_its_state_with_fewer_columns_too() -> None:
    history = LoadHistory({"a": 2, "b": 3}, columns=8)
    for step in range(1, 8):
        history.add(step, step, {"a": load([step, 1]), "b": load([1, 1, step], bias=[0, 1, 2])})
    again = LoadHistory.from_state(history.state_dict(), 8)
    assert again.state_dict() == history.state_dict()
    fewer = LoadHistory.from_state(history.state_dict(), 4)
    assert [(column.first, column.last) for column in fewer.columns] == [(1, 2), (3, 4), (5, 6), (7, 7)]
    fewer.add(8, 8, {"a": load([8, 1]), "b": load([1, 1, 8])})
    assert fewer.series("a").tokens_E.tolist() == [[3, 2], [7, 2], [11, 2], [15, 2]]


def test_files_have_the_numbers_of_the_steps(tmp_path) -> None:
    history = LoadHistory({"a": 2, "b": 3})
    history.add(1, 1, {"a": load([6, 2], [1, 0], [-0.25, 0.5]), "b": load([0, 0, 0])})
    history.add(2, 3, {"a": load([4, 4], bias=[0, 0]), "b": load([1, 1, 4])})
    history.write(tmp_path)
    with (tmp_path / "expert_load.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["imbalance"] for row in rows] == ["1.5", "", "1", "2"]
    assert [(row["first_step"], row["last_step"], row["layer"]) for row in rows[1:3]] == [
        ("1", "1", "b"),
        ("2", "3", "a"),
    ]
    assert (rows[0]["dropped_share"], rows[0]["bias_spread"], rows[3]["bias_spread"]) == ("0.125", "0.75", "")
    data = json.loads((tmp_path / "expert_load.json").read_text())
    assert data["steps"] == [[1, 1], [2, 3]]
    assert data["layers"]["a"] == {
        "imbalance": [1.5, 1.0],
        "tokens": [[6, 2], [4, 4]],
        "dropped": [[1, 0], [0, 0]],
        "bias": [[-0.25, 0.5], [0.0, 0.0]],
    }
    assert data["layers"]["b"] == {
        "imbalance": [None, 2.0],
        "tokens": [[0, 0, 0], [1, 1, 4]],
        "dropped": [[0, 0, 0], [0, 0, 0]],
        "bias": None,
    }


def meshes(figure) -> list[list[list[float]]]:
    return [
        axes.collections[0].get_array().tolist()
        for inner in figure.subfigs
        for axes in inner.axes
        if axes.collections and axes.get_label() != "<colorbar>"
    ]


def test_the_chart_has_a_panel_for_each_layer_and_quantity() -> None:
    history = LoadHistory({"a": 2, "b": 4})
    history.add(1, 1, {"a": load([6, 2], [3, 0], [-1, 1]), "b": load([1, 1, 1, 5])})
    history.add(2, 2, {"a": load([4, 4], [0, 0], [-2, 2]), "b": load([2, 2, 2, 2])})
    panels = meshes(draw_loads(history, "t"))
    assert panels[0] == [[1.5, 1.0], [0.5, 1.0]]
    assert [[0.5, 0.0], [0.0, 0.0]] in panels
    assert [[-1.0, -2.0], [1.0, 2.0]] in panels
    assert len(panels) == 5  # b has no bias
    history = LoadHistory({str(layer): 2 for layer in range(20)})
    history.add(1, 1, {name: load([1, 1]) for name in history.layers})
    figure = draw_loads(history, "many")
    assert len(meshes(figure)) == 8
    (everything,) = [image for inner in figure.subfigs for axes in inner.axes for image in axes.images]
    assert everything.get_array().shape == (20, 2)


# Who holds what


def test_neighbours_hold_different_experts_and_tensor_parts_lie_inside() -> None:
    places = ExpertPlaces(size=2, same=2)
    assert [places.holders(0), places.holders(1)] == [[0, 2], [1, 3]]
    cut = ExpertPlaces(size=2, same=1, tensor=2, replicas=2)
    assert [cut.holders(0), cut.holders(1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert cut.ranks == 8


def test_the_report_says_what_a_rank_holds() -> None:
    found = [described(f"layers.{i}.mlp.experts", 4) for i in range(3)] + [described("head.experts", 8, None)]
    text = describe_experts(found, ExpertPlaces(2, same=2), experts_shards=2)
    lines = [line.split() for line in text.splitlines()]
    bytes_of_four = 4 * 3 * 6 * 8 * 4
    own = f"{bytes_of_four / 2 / 2**10:.1f}"
    assert ["layers.*.mlp.experts", "(3)", "4", "2", "2", own, "KiB"] in lines
    assert lines[3][:4] == ["head.experts", "8", "?", "4"]
    assert "Expert axis of 2: 2 ranks have the same ones, and other tokens." in text
    assert "rank 0, 2  experts 0-1 of 4; 0-3 of 8" in text
    assert "rank 1, 3  experts 2-3 of 4; 4-7 of 8" in text
    assert "as ZeRO shards them over 2 ranks." in text


def test_the_report_of_many_ranks_is_short() -> None:
    text = describe_experts([described("experts", 64)], ExpertPlaces(64, same=16))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "rank 0, 64, 128, ..., 960 experts 0" in lines
    assert "rank 63, 127, 191, ..., 1023 experts 63" in lines
    assert len(text.splitlines()) < 15
    assert "every rank holds all experts" in describe_experts([described("experts", 4)], ExpertPlaces(1, same=2))


def test_modules_without_experts_have_nothing_to_tell() -> None:
    assert describe_experts([], ExpertPlaces(1)) == "No experts."
