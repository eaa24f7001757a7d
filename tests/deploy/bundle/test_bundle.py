"""What a bundle keeps comes back as it was, and what is missing is said."""

import pytest
import torch

from confitune.deploy import Bundle, BundleError, changing, check_tasks
from confitune.tasks import load_folder_task
from deploy.bundle.shared import NETWORK, by_hand, logits, no_way_back, same_tensors
from deploy.shared import contents_and_times as contents

# ---- in and out ------------------------------------------------------------------------------------------------------


def test_a_bundle_made_by_hand_reopens_as_it_was(trained, images, tmp_path):
    net = trained("test_byobnet")
    states = {task: net.task_state_dict(task) for task in net.tasks}
    made = by_hand(tmp_path / "model", net)
    again = Bundle.open(tmp_path / "model")
    assert list(again.tasks) == ["pets", "birds"]
    assert again.tasks == made.tasks
    assert again.record("pets").classes == ("cat", "dog", "hare")
    assert (again.record("pets").accuracy, again.record("pets").images, again.record("pets").epochs) == (87.5, 12, 3)
    assert again.network == NETWORK
    assert [record.checked for record in again.tasks.values()] == [75.0, 75.0]
    assert (again.manifest.lineage, again.manifest.version, again.manifest.written) == (
        made.manifest.lineage,
        made.manifest.version,
        made.manifest.written,
    )
    assert again.held_out("pets") is None
    loaded = again.load_network(["pets", "birds"])
    assert loaded.current_task == "birds"
    for task, state in states.items():
        assert same_tensors(again.task_state(task), state)
        with torch.no_grad():
            assert torch.equal(net.eval()(images(), task), loaded.eval()(images(), task))


def test_a_learned_bundle_reopens_with_the_same_logits(taught):
    path = taught(2)
    bundle, again = Bundle.open(path), Bundle.open(str(path))
    assert list(again.tasks) == ["reds", "stripes"]
    assert again.record("stripes").classes == ("stripes 0", "stripes 1", "stripes 2")
    assert (again.record("reds").images, again.record("stripes").images) == (16, 24)
    stored = again.record("reds").file
    assert stored.bytes == (path / "tasks" / f"{stored.sha256}.safetensors").stat().st_size
    for task in bundle.tasks:
        assert same_tensors(bundle.task_state(task), again.task_state(task))
        assert torch.equal(logits(bundle, task), logits(again, task))
    assert not torch.equal(logits(bundle, "reds"), logits(bundle, "stripes")[:, :2])


def test_kept_images_are_the_test_images_bit_for_bit(taught_once, photos, decoded):
    bundle = Bundle.open(taught_once[1])
    task = load_folder_task(photos("reds"), "reds", mean=(0,) * 3, std=(1,) * 3, cache_dir=decoded)
    pixels, labels = task.test.batch(torch.arange(4))
    kept = bundle.held_out("reds")
    assert kept.test.labels.tolist() == labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(kept.test.pixels, pixels)


# ---- what is not there -----------------------------------------------------------------------------------------------


def test_an_empty_bundle_says_so(tmp_path):
    with pytest.raises(BundleError, match="has no tasks yet"):
        _ = Bundle(tmp_path / "model", NETWORK).manifest.lineage


def test_a_bundle_that_lost_its_heads_is_not_taken_for_leftovers(taught, teach):
    path = no_way_back(taught(2))
    (path / "bundle.json").unlink()
    before = contents(path)
    with pytest.raises(BundleError, match=r"is not a bundle: create one with `confitune learn`"):
        Bundle.open(path)
    with pytest.raises(BundleError, match=r"holds tasks but no bundle\.json: restore it from a copy"):
        teach("greens", path)
    assert contents(path) == before


@pytest.mark.parametrize(
    "wrong", [{"labels": torch.tensor([0, 7])}, {"labels": torch.tensor([0])}, {"pixels": torch.zeros(2)}, {}]
)
def test_held_out_images_that_are_none_are_damaged(taught, wrong):
    bundle = Bundle.open(taught(1))
    kept = {"pixels": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "labels": torch.tensor([0, 1]), **wrong}
    kept = kept if wrong else {"pixels": kept["pixels"]}
    with changing(bundle) as change:
        record = bundle.record("reds").model_copy(update={"held_out": bundle.files.store("held-out", kept)})
        change.add_task("again", record)
    with pytest.raises(BundleError, match=r"held-out.\w{64}\.safetensors is not what a bundle keeps: "):
        check_tasks(bundle, "cpu")
