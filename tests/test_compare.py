# SPDX-License-Identifier: Apache-2.0
"""Two runs are the same only if every point and every byte is."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from mindspeed_recovery.testing.compare import Comparison, compare_scalars, compare_states, scalars, value_of

pytestmark = pytest.mark.timeout(60)

Points = list[tuple[str, float, int]]

LOSS: Points = [("loss", 2.5, 1), ("loss", 1.25, 2)]


def write(folder: Path, points: Points, **options: Any) -> Path:
    writer = SummaryWriter(str(folder))
    for tag, value, step in points:
        writer.add_scalar(tag, value, step, **options)
    writer.close()
    return folder


def nan(payload: int) -> float:
    return value_of(0x7FC00000 | payload)


class TestScalars:
    def test_every_point_is_read_with_its_bits(self, tmp_path: Path) -> None:
        points = scalars(write(tmp_path, [("loss", 1.0, 1), ("loss", -0.0, 2), ("norm", 0.1, 1)]))
        assert points == {("loss", 1): [0x3F800000], ("loss", 2): [0x80000000], ("norm", 1): [0x3DCCCCCD]}

    def test_a_point_written_twice_is_there_twice(self, tmp_path: Path) -> None:
        points = scalars(write(tmp_path, [("loss", 1.0, 1), ("loss", 2.0, 1)]))
        assert [value_of(bits) for bits in points["loss", 1]] == [1.0, 2.0]

    def test_all_files_below_the_folder_are_read(self, tmp_path: Path) -> None:
        write(tmp_path / "first", [("loss", 1.0, 1)])
        write(tmp_path / "second" / "deep", [("loss", 2.0, 2)])
        assert set(scalars(tmp_path)) == {("loss", 1), ("loss", 2)}

    def test_tensorboard_s_new_style_of_scalars_is_read_alike(self, tmp_path: Path) -> None:
        old, new = write(tmp_path / "old", LOSS), write(tmp_path / "new", LOSS, new_style=True)
        assert scalars(new) == scalars(old)

    def test_what_is_not_a_scalar_is_left_out(self, tmp_path: Path) -> None:
        writer = SummaryWriter(str(tmp_path))
        writer.add_text("arguments", "--lr 1", 1)
        writer.add_histogram("weights", torch.arange(4.0), 1)
        writer.add_scalar("loss", 1.0, 1)
        writer.close()
        assert set(scalars(tmp_path)) == {("loss", 1)}

    def test_a_folder_without_event_files_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no TensorBoard event file"):
            scalars(tmp_path)


class TestComparedScalars:
    def compare(self, tmp_path: Path, a: Points, b: Points) -> Comparison:
        return compare_scalars(write(tmp_path / "a", a), write(tmp_path / "b", b))

    def test_equal_runs_are_identical(self, tmp_path: Path) -> None:
        comparison = self.compare(tmp_path, LOSS, LOSS)
        assert (comparison.compared, comparison.equal, comparison.differences) == (2, 2, [])
        assert comparison.identical

    def test_the_last_bit_counts(self, tmp_path: Path) -> None:
        comparison = self.compare(tmp_path, LOSS, [LOSS[0], ("loss", value_of(0x3FA00001), 2)])
        assert not comparison.identical
        assert (comparison.compared, comparison.equal) == (2, 1)
        (text,) = comparison.differences
        assert text.startswith("'loss' at step 2: 1.25 (0x3fa00000) is not ")
        assert text.endswith("(0x3fa00001)")

    def test_negative_zero_is_not_zero(self, tmp_path: Path) -> None:
        assert not self.compare(tmp_path, [("loss", 0.0, 1)], [("loss", -0.0, 1)]).identical

    def test_a_nan_equals_the_nan_of_the_same_bits_only(self, tmp_path: Path) -> None:
        point = [("loss", math.nan, 1)]
        assert self.compare(tmp_path / "same", point, point).identical
        assert not self.compare(tmp_path / "other", [("loss", nan(1), 1)], [("loss", nan(2), 1)]).identical

    @pytest.mark.parametrize("side", ["a", "b"])
    def test_a_missing_point_is_a_difference(self, tmp_path: Path, side: str) -> None:
        runs = (LOSS, LOSS[:1]) if side == "a" else (LOSS[:1], LOSS)
        comparison = self.compare(tmp_path, *runs)
        assert comparison.differences == [f"'loss' at step 2: only in {side}"]
        assert not comparison.identical

    def test_a_point_written_again_is_a_difference(self, tmp_path: Path) -> None:
        comparison = self.compare(tmp_path, LOSS, [*LOSS, LOSS[1]])
        assert comparison.differences == ["'loss' at step 2: written 1 times in a, 2 times in b"]

    def test_ignored_tags_are_not_compared(self, tmp_path: Path) -> None:
        comparison = self.compare(tmp_path, LOSS, [*LOSS, ("recovery/milliseconds", 3.0, 2)])
        assert comparison.identical
        assert comparison.compared == 2
        everything = compare_scalars(tmp_path / "a", tmp_path / "b", ignore=())
        assert everything.differences == ["'recovery/milliseconds' at step 2: only in b"]

    def test_nothing_to_compare_is_not_identical(self, tmp_path: Path) -> None:
        assert not self.compare(tmp_path, [("recovery/a", 1.0, 1)], [("recovery/a", 1.0, 1)]).identical


class TestComparedStates:
    def compare(self, tmp_path: Path, a: Any, b: Any) -> Comparison:
        for name, state in (("a", a), ("b", b)):
            torch.save(state, tmp_path / name)
        return compare_states(tmp_path / "a", tmp_path / "b")

    def differences(self, tmp_path: Path, a: Any, b: Any) -> list[str]:
        comparison = self.compare(tmp_path, a, b)
        assert comparison.identical == (not comparison.differences)
        return comparison.differences

    def test_equal_nested_states_are_identical(self, tmp_path: Path) -> None:
        def state() -> dict[str, Any]:
            return {
                "parameters": {"w": torch.zeros(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
                "optimizers": [{"state": [{"step": torch.tensor(3.0), "seen": torch.tensor([True, False])}]}],
                "pair": (1, None),
                "rng": torch.arange(5, dtype=torch.uint8),
                "complex": torch.tensor([1 + 2j]),
                "empty": torch.empty(0, 4),
            }

        comparison = self.compare(tmp_path, state(), state())
        assert comparison.identical
        assert comparison.compared == 9

    def test_a_difference_has_its_path(self, tmp_path: Path) -> None:
        a = {"optimizers": [{"state": [torch.zeros(4)]}]}
        b = {"optimizers": [{"state": [torch.tensor([0.0, 1.0, 0.0, 1.0])]}]}
        assert self.differences(tmp_path, a, b) == ["['optimizers'][0]['state'][0]: 2 of 4 elements differ"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_tensors_are_compared_by_their_bytes(self, tmp_path: Path, dtype: torch.dtype) -> None:
        zero, nans = torch.zeros(2, dtype=dtype), torch.full((2,), math.nan, dtype=dtype)
        assert self.differences(tmp_path, [zero], [-zero]) == ["[0]: 2 of 2 elements differ"]
        assert self.differences(tmp_path, [nans], [nans.clone()]) == []

    def test_a_view_equals_a_tensor_of_the_same_values(self, tmp_path: Path) -> None:
        matrix = torch.arange(6.0).reshape(2, 3)
        assert self.differences(tmp_path, [matrix.t()], [matrix.t().contiguous()]) == []

    def test_dtype_and_shape_count(self, tmp_path: Path) -> None:
        a = {"dtype": torch.zeros(2), "shape": torch.zeros(2, 1)}
        b = {"dtype": torch.zeros(2, dtype=torch.int32), "shape": torch.zeros(2)}
        assert self.differences(tmp_path, a, b) == [
            "['dtype']: dtype torch.float32 is not torch.int32",
            "['shape']: shape [2, 1] is not [2]",
        ]

    def test_missing_entries_are_differences(self, tmp_path: Path) -> None:
        a, b = {"w": 1, "old": 2, "list": [1, 2]}, {"w": 1, "new": 3, "list": [1]}
        found = self.differences(tmp_path, a, b)
        assert found == ["['old']: only in a", "['list'][1]: only in a", "['new']: only in b"]

    @pytest.mark.parametrize(
        ("a", "b", "text"),
        [
            (3, 4, "3 is not 4"),
            (1, True, "int is not bool"),
            (torch.zeros(1), 0.0, "Tensor is not float"),
            ([1], {0: 1}, "list is not dict"),
        ],
    )
    def test_other_values_count_with_their_type(self, tmp_path: Path, a: Any, b: Any, text: str) -> None:
        assert self.differences(tmp_path, {"x": a}, {"x": b}) == [f"['x']: {text}"]

    def test_a_file_that_is_not_nested_has_a_place_too(self, tmp_path: Path) -> None:
        found = self.differences(tmp_path, torch.zeros(1), torch.ones(1))
        assert found == ["all of it: 1 of 1 elements differ"]

    def test_empty_states_prove_nothing(self, tmp_path: Path) -> None:
        assert not self.compare(tmp_path, {}, {}).identical
