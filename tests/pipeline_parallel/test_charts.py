import pytest
from matplotlib.collections import PolyCollection

from lightning_5d.pipeline_parallel import Durations, make_schedule, simulate
from lightning_5d.pipeline_parallel.chart import draw_schedules
from lightning_5d.pipeline_parallel.text_chart import chart_text


def simulated(name, ranks, microbatches, **options):
    return simulate(make_schedule(name, ranks, microbatches, **options))


def boxes(axes):
    return sum(len(found.get_paths()) for found in axes.collections if isinstance(found, PolyCollection))


def numbers(axes):
    return [text.get_text() for text in axes.texts if text.get_text().isdecimal()]


def test_every_action_is_a_box_with_the_number_of_its_microbatch():
    axes = draw_schedules([simulated("1f1b", 4, 8)]).axes[0]
    assert boxes(axes) == 4 * 8 * 2
    assert sorted(numbers(axes)) == [str(microbatch) for microbatch in range(8) for _ in range(8)]
    assert axes.get_title(loc="left") == "1f1b: 4 ranks, 4 stages, 8 microbatches: bubble 27.3%, peak 4 microbatches"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert axes.get_ylim() == (3.5, -0.5)


def test_the_first_rank_starts_at_0_and_a_box_is_as_long_as_its_action():
    axes = draw_schedules([simulate(make_schedule("1f1b", 2, 2), Durations(1, 1.5, 0.5))]).axes[0]
    corners = [path.get_extents() for found in axes.collections for path in found.get_paths()]
    rows = [[(box.x0, box.x1) for box in corners if round(box.y0 + 0.43) == rank] for rank in (0, 1)]
    assert sorted(rows[0]) == [(0, 1), (1, 2), (4, 6), (7, 9)]
    assert sorted(rows[1]) == [(1, 2), (2, 4), (4, 5), (5, 7)]


def test_both_halves_of_a_pair_are_drawn():
    axes = draw_schedules([simulated("dualpipe", 4, 8)]).axes[0]
    schedule = make_schedule("dualpipe", 4, 8)
    split = sum(entry.cell.count("B") - entry.cell.count("BW") for row in schedule.rows for entry in row)
    assert boxes(axes) == 4 * 8 * 2 + split


def test_one_schedule_comes_with_its_memory():
    rows, memory = draw_schedules([simulated("1f1b", 4, 8)]).axes
    assert memory.get_ylabel() == "live activations\n(microbatches)"
    assert memory.get_xlabel() == "time; F = 1, B = 1, W = 1 (a rank's share of a microbatch)"
    assert max(memory.lines[-1].get_ydata()) == 4
    assert len(memory.lines) == 4
    assert rows.get_xlim() == memory.get_xlim() == (0, 33)


def test_several_schedules_share_a_clock_and_come_with_a_table():
    *panels, table = draw_schedules([simulated("1f1b", 4, 8), simulated("zb_h1", 4, 8), simulated("zb_h2", 4, 8)]).axes
    assert {panel.get_xlim() for panel in panels} == {(0, 33)}
    assert "bubble 0.0% (11.1% with a barrier after each step), peak 7" in panels[2].get_title(loc="left")
    cells = {place: cell.get_text().get_text() for place, cell in table.tables[0].get_celld().items()}
    assert [cells[2, column] for column in range(7)] == ["zb_h1", "4", "27", "3", "11.1%", "11.1%", "4"]


def test_the_legend_lists_what_is_there():
    def entries(*names):
        figure = draw_schedules([simulated(name, 4, 8) for name in names])
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert entries("1f1b") == ["forward (F)", "backward (BW)", "bubble"]
    assert entries("zb_v") == [
        "forward (F)", "input gradient (B)", "weight gradient (W)", "lighter: later stage of the rank", "bubble",
    ]  # fmt: skip
    assert "lighter: second direction" in entries("dualpipe")


@pytest.mark.parametrize("names", [["1f1b"], ["dualpipe"], ["zb_v", "afab"]])
def test_the_legend_and_the_notes_at_the_side_lie_inside_the_picture(names):
    figure = draw_schedules([simulated(name, 2, 4) for name in names])
    figure.draw_without_rendering()
    inner = [figure.legends[0], *(text for axes in figure.axes for text in axes.texts)]
    inner += [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    for artist in inner:
        box = artist.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    titles = [axes.title.get_window_extent() for axes in figure.axes[:1]]
    assert all(figure.legends[0].get_window_extent().y0 >= title.y1 for title in titles)


def test_a_large_schedule_stays_a_picture_one_can_open():
    figure = draw_schedules([simulated("interleaved_1f1b", 16, 64, chunks=8)])
    assert max(figure.get_size_inches()) <= 30
    assert boxes(figure.axes[0]) == 16 * 64 * 8 * 2
    assert numbers(figure.axes[0]) == []  # too narrow to be read


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no schedule"):
        draw_schedules([])


def test_text_shows_every_box_where_there_is_room():
    assert chart_text(simulated("1f1b", 2, 3)).plain.splitlines() == [
        "rank 0 F0 F1 ......B0--- F2 B1--- ...B2---  bubble 3, peak 2",
        "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ...... bubble 3, peak 1",
    ]
    assert chart_text(simulated("zb_v", 1, 2)).plain == "rank 0 F0 f0 b0 w0 F1 B0 W0 f1 b1 B1 w1 W1  bubble 0, peak 1\n"


def test_text_shrinks_to_the_width_and_says_when_boxes_are_lost():
    simulation = simulated("1f1b", 2, 3)
    assert "F0F1....B0- F2B1- ..B2- " in chart_text(simulation, 50).plain
    assert chart_text(simulation, 40).plain.startswith("rank 0 FF..B-FB-.B- bubble 3, peak 2\n")
    text = chart_text(simulated("1f1b", 4, 40), 100).plain.splitlines()
    assert {len(line) for line in text[:4]} == {100}
    assert text[4].startswith("Not every box fits: that takes 153 columns, and 411 with numbers")
