from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import dask.config
import pytest
import yaml
from dask.utils import byte_sizes
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.config import (
    HOOK,
    HOOKED,
    PATHS,
    PUBLIC_KEYS,
    ConfigError,
    Size,
    load,
    problems,
    without_effect,
)

ROOT = Path(__file__).parents[3]
DEFAULTS = yaml.safe_load(files("dask_gpurt").joinpath("gpurt.yaml").read_text())
SCHEMA = yaml.safe_load(files("dask_gpurt").joinpath("gpurt-schema.yaml").read_text())


def nested(key: str, value: object) -> dict[str, Any]:
    """Make a configuration in which only ``key`` is set."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def schema_leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, inner in schema["properties"].items():
        if "properties" in inner:
            assert inner["additionalProperties"] is False
            yield from schema_leaves(inner, f"{prefix}{name}.")
        else:
            assert inner["description"].strip(), name
            yield prefix + name


@pytest.mark.parametrize("config", [{}, {"gpurt": None}, {"gpurt": {"exchange": None}}, {"gpurt": {}}])
def test_a_setting_that_is_not_given_has_its_default(config: dict[str, Any]) -> None:
    assert load(config) == load(DEFAULTS)


def test_defaults_schema_and_settings_have_the_same_keys() -> None:
    assert sorted(leaves(DEFAULTS)) == sorted(schema_leaves(SCHEMA)) == sorted(PUBLIC_KEYS)
    assert len(PUBLIC_KEYS) <= 21


def test_defaults_satisfy_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the schema is validated with jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(DEFAULTS, SCHEMA)


def test_schema_knows_the_paths() -> None:
    paths = SCHEMA["properties"]["gpurt"]["properties"]["exchange"]["properties"]["paths"]
    assert paths["oneOf"][1]["items"]["enum"] == list(PATHS)


def test_defaults_are_in_dask_config() -> None:
    dask.config.refresh()  # ``gen_cluster`` restores the configuration from before the package was imported
    for key in PUBLIC_KEYS:
        assert dask.config.get(key, default=dask.config) is not dask.config


def test_load_reads_the_environment() -> None:
    env = {
        "DASK_GPURT__ENABLED": "true",
        "DASK_GPURT__EXCHANGE__INFLIGHT": "1000000",
        "DASK_GPURT__EXCHANGE__PATHS": "[shared_memory, comms]",
        "DASK_GPURT__SHUFFLE__RETRIES": "0",
    }
    settings = load(dask.config.collect(paths=[], env=env))
    assert settings.enabled
    assert settings.exchange.inflight == 1_000_000
    assert settings.exchange.paths == {"shared-memory", "comms"}
    assert settings.shuffle.retries == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("gpurt.enabled", True, True),
        ("gpurt.enabled", 1, True),
        ("gpurt.enabled", "Yes", True),
        ("gpurt.enabled", "off", False),
        ("gpurt.takeover", "0", False),
        ("gpurt.takeover", "All", "all"),
        ("gpurt.exchange.pool", "AUTO", None),
        ("gpurt.exchange.pool", "50 %", Size(fraction=0.5)),
        ("gpurt.exchange.inflight", 1e9, 10**9),
        ("gpurt.exchange.inflight", "1.5GiB", 3 * 2**29),
        ("gpurt.memory.disk", "100%", Size(fraction=1.0)),
        ("gpurt.exchange.paths", "auto", set(PATHS)),
        ("gpurt.exchange.paths", [], {"comms"}),
        ("gpurt.exchange.paths", ["cuda-ipc"], {"cuda-ipc", "comms"}),
        ("gpurt.exchange.paths", "shared-memory,cuda-ipc", set(PATHS)),
        ("gpurt.shuffle.retries", "3", 3),
        ("gpurt.overlap.mode", "Calibrated", "calibrated"),
        ("gpurt.overlap.mode", False, "off"),
        ("gpurt.overlap.mode", "4", 4),
        ("gpurt.overlap.mode", 1, 1),
        ("gpurt.planning.partition-size", "0", 0),
        ("gpurt.planning.broadcast-size", "Auto", None),
        ("gpurt.planning.store", "auto", "auto"),
        ("gpurt.planning.store", False, None),
        ("gpurt.planning.store", "Off", None),
        ("gpurt.planning.store", "/tmp/plans/results", "/tmp/plans/results"),
    ],
)
def test_good_values(key: str, value: object, expected: object) -> None:
    found: Any = load(nested(key, value))
    for name in key.split(".")[1:]:
        found = getattr(found, name.replace("-", "_"))
    assert found == expected
    assert isinstance(found, bool) == isinstance(expected, bool)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpurt.enabled", "yes please"),
        ("gpurt.enabled", None),
        ("gpurt.enabled", 2),
        ("gpurt.takeover", []),
        ("gpurt.takeover", "some"),
        ("gpurt.exchange", "auto"),
        ("gpurt.exchange.pool", "12 parsecs"),
        ("gpurt.exchange.pool", "-1 GiB"),
        ("gpurt.exchange.pool", 0),
        ("gpurt.exchange.pool", "0%"),
        ("gpurt.exchange.pool", "140%"),
        ("gpurt.exchange.pool", "nan"),
        ("gpurt.exchange.pool", float("nan")),
        ("gpurt.exchange.pool", float("inf")),
        ("gpurt.exchange.pool", "1e999 GiB"),
        ("gpurt.exchange.pool", "GiB"),
        ("gpurt.exchange.pool", ""),
        ("gpurt.exchange.pool", True),
        ("gpurt.exchange.pool", 0.5),
        ("gpurt.exchange.pool", "٣ GiB"),
        ("gpurt.exchange.inflight", "30%"),
        ("gpurt.exchange.inflight", "auto"),
        ("gpurt.memory.device", {"share": "30%"}),
        ("gpurt.exchange.paths", 7),
        ("gpurt.shuffle.retries", -1),
        ("gpurt.shuffle.retries", 1.5),
        ("gpurt.shuffle.retries", True),
        ("gpurt.shuffle", 5),
        ("gpurt.reads.threads", 0),
        ("gpurt.reads.threads", True),
        ("gpurt.reads.threads", "many"),
        ("gpurt.reads.beside", -1),
        ("gpurt.overlap.mode", "always"),
        ("gpurt.overlap.mode", True),
        ("gpurt.overlap.mode", 0),
        ("gpurt.overlap.mode", "0"),
        ("gpurt.overlap.mode", -1),
        ("gpurt.overlap.mode", 4.0),
        ("gpurt.overlap.mode", None),
        ("gpurt.planning.store", ""),
        ("gpurt.planning.store", True),
    ],
)
def test_bad_values_are_named_with_what_would_be_right(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        load(nested(key, value))
    assert f"{key!r} is {value!r}: expected " in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [("gpurt.reads.threads", 0, 1), ("gpurt.reads.threads", "many", 1), ("gpurt.reads.beside", -1, 0)],
)
def test_a_wrong_number_is_told_that_auto_would_do_too(key: str, value: object, least: int) -> None:
    (problem,) = problems(nested(key, value))
    assert problem == f"{key!r} is {value!r}: expected 'auto' or a whole number of at least {least}"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gprut.enabled", "gpurt"),
        ("gpu-rt.enabled", "gpurt"),
        ("gpurt.enable", "gpurt.enabled"),
        ("gpurt.exchnage.pool", "gpurt.exchange"),
        ("gpurt.exchange.pol", "gpurt.exchange.pool"),
        ("gpurt.exchange.in-flight", "gpurt.exchange.inflight"),
        ("gpurt.pool", "gpurt.exchange.pool"),
        ("gpurt.shuffle.retry", "gpurt.shuffle.retries"),
    ],
)
def test_unknown_key_has_a_suggestion(key: str, meant: str) -> None:
    (problem,) = problems(nested(key, 1))
    unknown = next(
        part for part in (key, *(key.rsplit(".", n)[0] for n in (1, 2))) if f"{part!r}:" in problem
    )
    assert problem == f"unknown key {unknown!r}: did you mean {meant!r}?"


def test_unknown_path_has_a_suggestion() -> None:
    (problem,) = problems(nested("gpurt.exchange.paths", ["shared-memroy"]))
    assert "'shared-memroy' in 'gpurt.exchange.paths': did you mean 'shared-memory'?" in problem


@pytest.mark.parametrize("section", ["gpu", "distributed", "rmm", "report", 3])
def test_sections_of_others_are_left_alone(section: object) -> None:
    assert problems({section: {"pool": "nonsense"}}) == []  # type: ignore[dict-item]


def test_problems_lists_all_and_load_raises_the_first() -> None:
    config = {"gpurt": {"enabled": "perhaps", "colour": 1, "exchange": {"pool": "?", "paths": "auto"}}}
    found = problems(config)
    assert len(found) == 3
    for key in ("colour", "enabled", "exchange.pool"):
        assert any(f"'gpurt.{key}'" in problem for problem in found)
    with pytest.raises(ConfigError) as error:
        load(config)
    assert str(error.value) == found[0]


@given(st.decimals("0.001", 100, places=3), st.integers(0, 2**50))
def test_share_survives_its_text_and_stays_within_the_whole(percent: object, total: int) -> None:
    share = Size.parse(f"{percent}%")
    assert Size.parse(str(share)) == share
    assert 0 <= share.of(total) <= total


@given(
    st.integers(1, 10**6),
    st.sampled_from(sorted(byte_sizes)),
    st.sampled_from(["", " ", "  "]),
    st.booleans(),
)
def test_size_knows_the_units_of_dask(number: int, unit: str, space: str, upper: bool) -> None:
    text = f"{number}{space}{unit.upper() if upper else unit}"
    assert Size.parse(text).of(0) == number * byte_sizes[unit]


@given(st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.booleans(), st.lists(st.integers())))
def test_size_is_right_or_a_config_error(value: object) -> None:
    try:
        size = Size.parse(value, key="some.key")
    except ConfigError as error:
        assert str(error).startswith("'some.key' is ")
    else:
        assert size.of(1000) >= 0


def test_import_is_light() -> None:
    code = """
import sys, dask
before = set(sys.modules)
import dask_gpurt.config
print(*sorted(name.partition(".")[0] for name in set(sys.modules) - before))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) == {"dask_gpurt"}


def test_preload_file_names_the_hook_for_every_role() -> None:
    hooks = yaml.safe_load((ROOT / "etc/dask/gpurt.yaml").read_text())
    roles = ("scheduler", "worker", "nanny", "client")
    assert hooks == {"distributed": {role: {"preload": ["dask_gpurt.preload"]} for role in roles}}


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["readme", "version"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "dask_gpurt._version.__version__"
    assert pkgutil.resolve_name(attribute) is dask_gpurt.__version__
    recipe = yaml.safe_load((ROOT / "conda/recipe/recipe.yaml").read_text())
    assert recipe["context"]["version"] == dask_gpurt.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == dask_gpurt.__version__


def test_a_setting_that_no_process_reads_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dask_gpurt.config._said", set())
    lists = {f"distributed.{where}.preload": ["mine"] for where in HOOKED}
    with dask.config.set({"gpurt.enabled": True, **lists}):
        load()
        load()
        with dask.config.set({"distributed.worker.preload": [HOOK]}):
            assert without_effect() is None
    assert ["so it has no effect" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(("where", "lines"), [("client", 0), ("elsewhere", 1)])
def test_whatever_loads_the_package_says_that_no_process_reads_the_setting(where: str, lines: int) -> None:
    """Of a script and the processes that it starts, only the script."""
    code = """
import multiprocessing
if __name__ == "__main__":
    import dask_gpurt
    child = multiprocessing.get_context("spawn").Process(target=__import__, args=("dask_gpurt",))
    child.start()
    child.join()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DASK_GPURT__ENABLED": "true"}
    env |= {f"DASK_DISTRIBUTED__{role.upper()}__PRELOAD": "[]" for role in HOOKED}
    env[f"DASK_DISTRIBUTED__{where.upper()}__PRELOAD"] = f"['{HOOK}']"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("so it has no effect") == lines
