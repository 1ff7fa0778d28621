import pytest

from sparsync import ConfigurationError
from sparsync.algorithm import Algorithm, check_density
from sparsync.presets import PRESETS, resolve
from sparsync.published.oktopk import OkTopk
from sparsync.selection import Exact
from sparsync.wire import CODECS, Coo
from tests.tables import refuses


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_unit_gets_parts_of_its_own(name):
    algorithm = resolve(name)
    assert algorithm.make_selector() is not algorithm.make_selector()
    assert algorithm.make_collective() is not algorithm.make_collective()


def test_oktopk_paper_is_as_published():
    collective = resolve("oktopk-paper").make_collective()
    assert (collective.boundaries, collective.global_threshold) == ("average", "allgather")
    assert (collective.repartition_period, collective.threshold_period) == (64, 32)
    assert (collective.buckets, collective.balance_trigger, collective.cap) == (2, 4.0, None)
    assert resolve("oktopk-paper").make_selector().cap is None


def test_options_reach_selector_and_collective():
    algorithm = resolve("oktopk", threshold_period=7, cap=2.0, buckets=1, rotate=False)
    selector, collective = algorithm.make_selector(), algorithm.make_collective()
    assert (selector.threshold_period, collective.threshold_period) == (7, 7)
    assert (selector.cap, collective.cap) == (2.0, 2.0)
    assert (collective.buckets, collective.rotate) == (1, False)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'oktpk' \(did you mean oktopk ") as caught:
        resolve("oktpk")
    assert all(name in str(caught.value) for name in PRESETS)


@refuses(
    ("dense", {"cap": 1.0}, "dense has no option cap; it has none"),
    ("allgather", {"buckets": 1}, "allgather has no option buckets; it has cap, codec"),
    ("oktopk", {"treshold_period": 9}, r"\(did you mean threshold_period\?\); it has balance, "),
    ("oktopk", {"tau": 9}, r"tau \(did you mean repartition_period\?\)"),  # as the paper calls it
    ("oktopk", {"buckets": 0}, "buckets is 0; give at least 1"),
    ("oktopk", {"threshold_period": 0}, "threshold_period is 0"),
    ("oktopk", {"repartition_period": 0}, "repartition_period is 0"),
    ("oktopk", {"cap": -1.0}, "cap is -1.0"),
    ("oktopk", {"boundaries": "mean"}, "boundaries is 'mean'; choose one of histogram, average"),
    ("oktopk", {"global_threshold": "x"}, "choose one of histogram, allgather"),
)
def test_bad_options_fail_before_the_first_step(name, options):
    resolve(name, **options)


@pytest.mark.parametrize("trigger", [0.5, float("nan")])
def test_a_balance_trigger_below_the_mean_is_refused(trigger):
    """With such a trigger, no rank could take over entries."""
    with pytest.raises(ConfigurationError, match=f"balance_trigger is {trigger}; give a"):
        resolve("oktopk", balance_trigger=trigger)


def test_an_algorithm_is_taken_as_it_is_and_has_its_own_options():
    own = Algorithm("mine", Exact, OkTopk)
    assert resolve(own) is own
    with pytest.raises(ConfigurationError, match="options cap belong to a preset's name"):
        resolve(own, cap=1.0)


@pytest.mark.parametrize("density", [0, -0.1, 1.5, 1e-320, float("nan"), float("inf"), "0.1", None])
def test_other_densities_are_refused(density):
    with pytest.raises(ConfigurationError, match=r"give the fraction k / n.*\(0, 1\]"):
        check_density(density)


def test_a_codec_is_an_object_or_its_name():
    assert resolve("allgather", codec="packed").make_collective().codec is CODECS["packed"]
    for given, says in (
        ("pakced", r"codec 'pakced' \(did you mean packed.*, packed, packed-fp32, packed-int8, "),
        (Coo, r"allgather: codec is .*Coo.*; give an object, Coo\(\)"),
        (3, "allgather: codec is 3; give a codec or the name of one"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            resolve("allgather", codec=given)
