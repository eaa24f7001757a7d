"""Links in a bundle, and files that are no files: refused on opening, so that no change reaches what is not its own."""

import os
import shutil
import signal

import pytest

from confitune.deploy import Bundle, BundleError, Predictor
from confitune.deploy.bundle.format import FOLDERS
from confitune.deploy.bundle.store import Store
from deploy.shared import contents

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes as POSIX has them")
NAMES = ("bundle.json", "bundle.before.json", ".lock", *FOLDERS)


def refused(path, work=None):
    with pytest.raises(BundleError, match=r"several hard links|not a regular file"):
        (work or Bundle.open)(path)


def change(path):
    with Store(path).alone():
        pytest.fail("it was locked")


@pytest.mark.parametrize("name", NAMES)
def test_a_symbolic_link_is_refused_and_what_it_leads_to_stays(taught, name):
    mine, other = taught(2), taught(2, "other")
    (mine / ".lock").touch()
    (other / ".lock").touch()
    shutil.move(mine / name, mine.parent / "away")
    (mine / name).symlink_to(other / name)
    before = contents(other)
    refused(mine)
    refused(mine, change)
    assert contents(other) == before


def test_a_bundle_that_is_reached_through_a_link_is_used(taught):
    path = taught(1)
    (path.parent / "link").symlink_to(path)
    assert list(Bundle.open(path.parent / "link").tasks) == ["reds"]


def test_a_copy_of_hard_links_is_refused(taught):
    path = taught(2)
    shutil.copytree(path, path.parent / "linked", copy_function=os.link)
    refused(path)
    refused(path.parent / "linked")
    shutil.rmtree(path.parent / "linked")
    assert list(Bundle.open(path).tasks) == ["reds", "stripes"]


def test_a_linked_task_is_damaged(taught):
    path = taught(2)
    file = path / "tasks" / f"{Bundle.open(path).record('reds').file.sha256}.safetensors"
    os.link(file, path.parent / "elsewhere")
    with pytest.raises(BundleError, match="several hard links"):
        Bundle.open(path).task_state("reds")
    assert Predictor.from_bundle(path, device="cpu").network_for("stripes")


@pytest.fixture
def in_time():
    """Whatever hangs fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", NAMES[:3])
def test_a_pipe_does_not_hang(taught, name):
    path = taught(2)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    refused(path)
    refused(path, change)


@pytest.mark.usefixtures("in_time")
def test_a_pipe_in_place_of_a_task_does_not_hang(taught):
    path = taught(1)
    file = path / "tasks" / f"{Bundle.open(path).record('reds').file.sha256}.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BundleError, match="not a regular file"):
        Bundle.open(path).task_state("reds")
