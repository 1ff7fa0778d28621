"""Test that reports of listed classes arrive from benchmark ranks, and others are refused."""

import io
import os
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from sparsync.cli.launch import gather


@dataclass
class Report:
    seconds: list


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("reached",)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


def test_plain_values_and_listed_classes_arrive(alone):
    assert gather({"a": [1, 2.5, "b"]}) == [{"a": [1, 2.5, "b"]}]
    assert gather(Report([1.0]), [Report]) == [Report([1.0])]


@pytest.mark.parametrize("sent", [Hostile(), Report([1.0])])
def test_nothing_else_is_made(alone, monkeypatch, sent):
    monkeypatch.setattr(torch, "save", lambda _, file: file.write(saved(sent)))
    with pytest.raises(pickle.UnpicklingError):
        gather("whatever")
    assert not (alone / "reached").exists()


def saved(thing, save=torch.save):
    file = io.BytesIO()
    save(thing, file)
    return file.getvalue()
