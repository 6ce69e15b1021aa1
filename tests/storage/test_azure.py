"""A second kind of server, Azurite: az:// keeps the promises that s3:// keeps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import megackpt
from megackpt.errors import CheckpointExists
from megackpt.storage import BucketStorage, conditional_puts
from tests import azurite
from tests.azurite import Container
from tests.buckets import Line, line_to
from tests.storage import test_bucket, test_bucket_faults as faults

pytestmark = [pytest.mark.campaign, pytest.mark.azurite]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with azurite.running() as endpoint:
        yield endpoint


@pytest.fixture
def container(server: str, monkeypatch: pytest.MonkeyPatch) -> Container:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    faults.hasten(monkeypatch)
    made = Container.new(server)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def line(container: Container, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    with line_to(container.endpoint) as line:
        endpoint = f"{line.endpoint}/{azurite.ACCOUNT}"
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        yield line


@pytest.fixture
def url(container: Container) -> str:
    return f"{container.url}/run/iter_100"


@pytest.mark.parametrize(
    "test",
    [
        test_bucket.test_absent,
        test_bucket.test_a_batch,
        test_bucket.test_threads_share_a_reader,
        test_bucket.test_a_conditional_put_has_one_winner_of_sixteen,
        test_bucket.test_put_if_match_replaces_one_version_only,
        test_bucket.test_typed_and_shaped_buffers,
    ],
)
def test_objects(url: str, test: object) -> None:
    """The tests of objects in S3 that need nothing of S3."""
    assert callable(test)
    test(BucketStorage(url))


def test_the_store_keeps_conditions(url: str) -> None:
    assert conditional_puts(BucketStorage(url))


@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
def test_a_checkpoint_is_saved_replaced_and_converted(
    tmp_path: Path, container: Container, url: str, strategy: str
) -> None:
    for value in (1.0, 2.0):
        megackpt.save(faults.state(value), url, strategy)
        assert faults.load(url) == value
        faults.assert_tidy(container, url)
    with pytest.raises(CheckpointExists):
        megackpt.save(faults.state(3.0), url, overwrite=False)
    assert megackpt.verify(url).ok
    megackpt.convert(url, tmp_path / "local", "safetensors")
    megackpt.convert(tmp_path / "local", f"{container.url}/back", strategy)
    assert megackpt.load_plain_tensors(f"{container.url}/back")["small"][0] == 2.0


def test_sixteen_race_on_a_bad_line(container: Container, line: Line, url: str) -> None:
    total: Counter[str] = Counter()
    for seed in range(3):
        total += faults.race(line, url, seed, faults.RACERS)
    print(f"\n3 races of {faults.RACERS}: {dict(total)}")
    megackpt.save(faults.state(3.0), url)
    assert faults.load(url) == 3.0
    faults.assert_tidy(container, url)


def test_readers_while_it_is_replaced(
    container: Container, line: Line, url: str
) -> None:
    print(f"\n{dict(faults.read_while_replaced(line, url, 10))}")
    megackpt.save(faults.state(100.0), url)
    assert faults.load(url) == 100.0
    faults.assert_tidy(container, url)
