"""Test that reports of listed classes arrive from benchmark ranks, and others are refused."""

import io
import os
import pickle
from dataclasses import dataclass

import pytest
import torch

from sparsync.cli.launch import gather


@dataclass
class Report:
    seconds: list


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("reached",)


def test_plain_values_and_listed_classes_arrive(alone):
    assert gather({"a": [1, 2.5, "b"]}) == [{"a": [1, 2.5, "b"]}]
    assert gather(Report([1.0]), [Report]) == [Report([1.0])]


@pytest.mark.parametrize("sent", [Hostile(), Report([1.0])])
def test_nothing_else_is_made(alone, monkeypatch, tmp_path, sent):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "save", lambda _, file: file.write(saved(sent)))
    with pytest.raises(pickle.UnpicklingError):
        gather("whatever")
    assert not (tmp_path / "reached").exists()


def saved(thing, save=torch.save):
    file = io.BytesIO()
    save(thing, file)
    return file.getvalue()
