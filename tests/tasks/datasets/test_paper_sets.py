"""The four sets of the paper, in small, in the layouts of their archives."""

import hashlib
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import train_test_split

from confitune.errors import DataError, DataMissingError
from confitune.tasks import TaskSequence, load_tasks
from confitune.tasks.datasets import paper_sets
from confitune.tasks.datasets.dataset import Remote
from confitune.tasks.decode import byte_wrap_table
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD


@pytest.fixture
def load(tmp_path: Path):
    def load(name: str, data_dir: Path, **options: object) -> TaskSequence:
        options = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "download": False, **options}
        return load_tasks(name, data_dir=data_dir, cache_dir=tmp_path / "cache", **options)

    return load


def test_flowers_split_order_and_labels(load, flowers_dir: Path, label_of) -> None:
    tasks = load("flowers102", flowers_dir, classes_per_task=2)
    # Species 1, 2, 3, 5, 6, 7 by name, in the order in which the global generator would put them.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        order = torch.randperm(6).tolist()
    names = ["pink primrose", "hard-leaved pocket orchid", "canterbury bells", "english marigold", "tiger lily"]
    names += ["moon orchid"]
    numbers = dict(zip(names, [1, 2, 3, 5, 6, 7], strict=True))
    assert [name for task in tasks for name in task.classes] == [names[i] for i in order]
    assert (sum(len(t.train) for t in tasks), sum(len(t.test) for t in tasks)) == (48, 12)
    for task in tasks:
        for images in (task.train, task.test):
            pixels, labels = images.batch(torch.arange(len(images)))
            assert [numbers[task.classes[i]] for i in labels] == [label_of(p) for p in pixels]


def test_flowers_split_is_over_all_images_in_file_order(load, flowers_dir: Path) -> None:
    from scipy.io import loadmat

    labels = loadmat(flowers_dir / "flowers-102/imagelabels.mat")["labels"].ravel()
    train, test = train_test_split(np.arange(60), stratify=labels, test_size=0.2, random_state=0)
    joint = load("flowers102", flowers_dir, classes_per_task=6).joined()[0]
    assert joint.train.rows.tolist() == sorted(train)
    assert joint.test.rows.tolist() == sorted(test)


def test_flowers_published_bytes_wrap(load, flowers_dir: Path) -> None:
    clean = load("flowers102", flowers_dir, classes_per_task=2)
    published = load("flowers102", flowers_dir, classes_per_task=2, pipeline="published")
    assert published.pipeline == "published"
    table = np.array(byte_wrap_table(IMAGENET_MEAN, IMAGENET_STD)).reshape(3, 256)
    before, after = clean[0].train.pixels, published[0].train.pixels
    assert torch.equal(clean[0].train.rows, published[0].train.rows)
    for row in range(0, 60, 7):  # images of one colour: resizing changes nothing
        expected = table[np.arange(3), before[row, :, 100, 100].numpy()]
        assert after[row, :, 100, 100].tolist() == expected.tolist()


def test_mean_and_std_make_another_store_only_where_they_change_bytes(load, flowers_dir: Path, tmp_path: Path) -> None:
    for pipeline in ("clean", "published"):
        for mean in (IMAGENET_MEAN, (0.5, 0.5, 0.5)):
            load("flowers102", flowers_dir, classes_per_task=2, pipeline=pipeline, mean=mean)
    stores = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "cache").glob("*.u8"))
    assert stores == ["flowers102-clean", "flowers102-published", "flowers102-published"]


def test_the_datasets_own_folder_is_accepted_too(load, flowers_dir: Path, tmp_path: Path) -> None:
    (flowers_dir / "flowers-102").rename(tmp_path / "my_flowers")
    assert len(load("flowers102", tmp_path / "my_flowers", classes_per_task=3)) == 2


def test_flowers_with_missing_images_or_broken_labels(load, flowers_dir: Path) -> None:
    (flowers_dir / "flowers-102/jpg/image_00007.jpg").unlink()
    with pytest.raises(DataError, match=r"cannot read the image .*image_00007\.jpg"):
        load("flowers102", flowers_dir, classes_per_task=3)
    (flowers_dir / "flowers-102/imagelabels.mat").write_bytes(b"nonsense" * 100)
    with pytest.raises(DataError, match=r"imagelabels\.mat"):
        load("flowers102", flowers_dir)


def test_caltech_drops_the_background_and_sorts_categories(load, caltech_dir: Path, label_of) -> None:
    tasks = load("caltech101", caltech_dir, classes_per_task=2)
    sorted_names = ["Faces", "airplanes", "ant", "barrel", "yin_yang"]  # capitals first, as sorted() has it
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()
    assert [c for t in tasks for c in t.classes] == [sorted_names[i] for i in order[:4]]
    assert tasks.unused_classes == (sorted_names[order[4]],)
    # The split is made over all five classes, the unused one included.
    labels = np.repeat(range(5), [10, 15, 5, 10, 6])
    train, _ = train_test_split(np.arange(46), stratify=labels, test_size=0.2, random_state=0)
    used = sorted(row for task in tasks for row in task.train.rows.tolist())
    assert used == sorted(row for row in train if labels[row] in order[:4])
    for task in tasks:
        pixels, found = task.test.batch(torch.arange(len(task.test)))
        assert [sorted_names.index(task.classes[i]) for i in found] == [label_of(p) for p in pixels]


def test_caltech_that_was_not_unpacked_to_the_end(load, caltech_dir: Path) -> None:
    (caltech_dir / "caltech101/caltech-101").mkdir()
    with pytest.raises(DataError, match="not unpacked to the end"):
        load("caltech101", caltech_dir)


def test_cub_official_split_and_boxes(load, cub_dir: Path, label_of) -> None:
    clean = load("cub200", cub_dir, classes_per_task=2)
    names = ["Black footed Albatross", "Laysan Albatross", "Sooty Albatross", "Groove billed Ani"]
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    assert [c for t in clean for c in t.classes] == [names[i] for i in order]
    joint = clean.joined()[0]
    assert sorted(joint.train.rows.tolist()) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert sorted(joint.test.rows.tolist()) == [1, 4, 7, 10]
    published = load("cub200", cub_dir, classes_per_task=2, pipeline="published")
    for task in published:
        pixels, labels = task.train.batch(torch.arange(len(task.train)))
        assert [names.index(task.classes[i]) for i in labels] == [label_of(p) for p in pixels]
        assert int(pixels[:, 2].min()) == int(pixels[:, 2].max()) == 128  # nothing but bird, and no byte wrapped
    assert int(joint.train.pixels[:, 2].min()) == 0  # the clean pipeline keeps what is around it


def test_cub_without_its_tables_is_whole_images(load, cub_dir: Path, tmp_path: Path) -> None:
    split = [
        line.split()[1] == "1" for line in (cub_dir / "CUB_200_2011/train_test_split.txt").read_text().splitlines()
    ]
    files = [line.split()[1] for line in (cub_dir / "CUB_200_2011/images.txt").read_text().splitlines()]
    for train, file in zip(split, files, strict=True):
        place = tmp_path / "files/cub200" / ("train" if train else "test") / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(cub_dir / "CUB_200_2011/images" / file, place)
    found, expected = (load("cub200", home, classes_per_task=2) for home in (tmp_path / "files", cub_dir))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.classes == theirs.classes
        for name in ("train", "test"):
            (pixels, labels), (other, told) = (
                images.batch(torch.arange(len(images))) for images in (getattr(mine, name), getattr(theirs, name))
            )
            assert torch.equal(pixels, other)
            assert torch.equal(labels, told)
    with pytest.raises(
        DataError, match=r"cub200: there are no bounding boxes .*; use 'clean', which takes whole images"
    ):
        load("cub200", tmp_path / "files", classes_per_task=2, pipeline="published")


def test_cub_archive_is_unpacked(load, cub_dir: Path, tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "elsewhere"
    home.mkdir()
    archive = pack(home / "CUB_200_2011.tgz", cub_dir / "CUB_200_2011")
    with pytest.raises(DataMissingError, match=r"CUB_200_2011\.tgz is not the published file"):
        load("cub200", home, classes_per_task=2)
    assert sorted(path.name for path in home.iterdir()) == [".cub200.lock", "CUB_200_2011.tgz"]
    monkeypatch.setattr("confitune.tasks.datasets.paper_sets.CUB_MD5", md5(archive))
    assert len(load("cub200", home, classes_per_task=2)) == 2
    assert sorted(path.name for path in home.iterdir()) == [".cub200.lock", "CUB_200_2011", "CUB_200_2011.tgz"]


def pack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname=folder.name)
    return archive


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_cub_with_incomplete_tables(load, cub_dir: Path) -> None:
    table = cub_dir / "CUB_200_2011/bounding_boxes.txt"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"cannot understand the tables .* 12; unpack the archive again"):
        load("cub200", cub_dir)


def test_missing_cub_says_where_to_get_it_and_makes_no_folder(load, tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=r"CUB_200_2011\.tgz.*data\.caltech\.edu.*CONFITUNE_DATA"):
        load("cub200", tmp_path / "nowhere", download=True)
    assert not (tmp_path / "nowhere").exists()


def test_cifar_official_split_enlarged_on_the_fly(load, cifar_dir: Path, label_of) -> None:
    tasks = load("cifar100", cifar_dir)
    assert [len(task.classes) for task in tasks] == [5, 5]
    assert [(len(task.train), len(task.test)) for task in tasks] == [(20, 5), (20, 5)]
    task = tasks[1]
    pixels, labels = task.train.batch(torch.arange(20))
    assert pixels.shape == (20, 3, 32, 32)
    assert [task.classes[i] for i in labels] == [f"class {label_of(p)}" for p in pixels]
    assert task.preprocess(pixels).shape == (20, 3, 224, 224)
    assert torch.equal(load("cifar100", cifar_dir, pipeline="published")[1].train.pixels, task.train.pixels)


def test_cifar_as_image_files_has_the_same_pixels(load, cifar_dir: Path, tmp_path: Path) -> None:
    expected = load("cifar100", cifar_dir)
    home = tmp_path / "files"
    for task in expected:
        for part, images in (("train", task.train), ("test", task.test)):
            for i, (pixels, label) in enumerate(zip(*images.batch(torch.arange(len(images))), strict=True)):
                place = home / f"cifar100/{part}/{task.classes[label]}/{i:03}.webp"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(place, lossless=True, quality=100)
    for mine, theirs in zip(load("cifar100", home), expected, strict=True):
        assert (mine.classes, mine.preprocess) == (theirs.classes, theirs.preprocess)
        for name in ("train", "test"):
            found, told = (
                {
                    (int(label), pixels.numpy().tobytes())
                    for pixels, label in zip(*of.batch(torch.arange(len(of))), strict=True)
                }
                for of in (getattr(mine, name), getattr(theirs, name))
            )
            assert found == told
    Image.new("RGB", (31, 32)).save(next(home.rglob("*.webp")))
    paper_sets.read_cifar_images.cache_clear()
    with pytest.raises(DataError, match="not of 32 x 32 pixels"):
        load("cifar100", home)


def test_cifar_files_cannot_run_code(load, cifar_dir: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "run",))

    (cifar_dir / "cifar-100-python/test").write_bytes(pickle.dumps({"data": Evil()}))
    with pytest.raises(DataError, match=r"cannot read .*test: it asks for pathlib"):
        load("cifar100", cifar_dir)
    assert not (tmp_path / "run").exists()
    (cifar_dir / "cifar-100-python/test").write_bytes(pickle.dumps({"data": 1}))
    with pytest.raises(DataError, match="does not hold CIFAR100's batches"):
        load("cifar100", cifar_dir)


@pytest.mark.parametrize("name", ["cifar100", "caltech101", "flowers102"])
def test_missing_data_and_failing_downloads_are_explained(load, tmp_path: Path, monkeypatch, name: str) -> None:
    with pytest.raises(DataMissingError, match=rf"{name} is not there: looked for .*To get it.*CONFITUNE_DATA"):
        load(name, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()

    def offline(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("confitune.tasks.datasets.dataset.download_url", offline)
    with pytest.raises(DataMissingError, match=r"fetching it failed: Name or service not known\. To get it"):
        load(name, tmp_path / "nowhere", download=True)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch):
    """Makes files that can be downloaded; gives those that were."""
    (tmp_path / "remote").mkdir()
    asked: list[str] = []

    def download(url: str, root: Path, name: str, expected: str) -> None:
        asked.append(url)
        shutil.copy(tmp_path / "remote" / name, Path(root) / name)

    monkeypatch.setattr("confitune.tasks.datasets.dataset.download_url", download)
    return tmp_path / "remote", asked


def publish(monkeypatch, name: str, file: Path) -> None:
    """Let the program know the file's checksum as that of the published one."""
    known = getattr(paper_sets, name)
    assert known.url.endswith(file.name)
    monkeypatch.setattr(paper_sets, name, Remote(known.url, md5(file)))


def test_flowers_are_downloaded(load, flowers_dir: Path, tmp_path: Path, remote, monkeypatch) -> None:
    folder, asked = remote
    archive = pack(folder / "102flowers.tgz", flowers_dir / "flowers-102/jpg")
    shutil.copy(flowers_dir / "flowers-102/imagelabels.mat", folder)
    new = tmp_path / "new/flowers-102"
    with pytest.raises(DataMissingError, match=r"102flowers\.tgz is not the published file"):
        load("flowers102", new, download=True)
    publish(monkeypatch, "FLOWERS_IMAGES", archive)
    asked.clear()
    # Given the dataset's own folder, which is not there yet, the download goes to that very place.
    tasks = load("flowers102", new, download=True, classes_per_task=3)
    assert len(tasks) == 2
    assert [url.rpartition("/")[2] for url in asked] == ["102flowers.tgz", "imagelabels.mat"]
    assert sorted(path.name for path in new.iterdir()) == ["imagelabels.mat", "jpg"]
    (new / "imagelabels.mat").unlink()
    load("flowers102", new, download=True, classes_per_task=3)
    assert asked[2:] == asked[1:2]  # only what was missing


def test_cifar_is_downloaded(load, cifar_dir: Path, tmp_path: Path, remote, monkeypatch) -> None:
    archive = pack(remote[0] / "cifar-100-python.tar.gz", cifar_dir / "cifar-100-python")
    publish(monkeypatch, "CIFAR_ARCHIVE", archive)
    assert len(load("cifar100", tmp_path / "new", download=True)) == 2
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".cifar100.lock", "cifar-100-python"]


def test_caltech_is_downloaded_as_an_archive_of_archives(
    load, caltech_dir: Path, tmp_path, remote, monkeypatch
) -> None:
    inner = pack(tmp_path / "101_ObjectCategories.tar.gz", caltech_dir / "caltech101/101_ObjectCategories")
    with zipfile.ZipFile(remote[0] / "caltech-101.zip", "w") as packed:
        packed.write(inner, f"caltech-101/{inner.name}")
        packed.writestr("caltech-101/Annotations.tar", b"not needed")
    publish(monkeypatch, "CALTECH_ARCHIVE", remote[0] / "caltech-101.zip")
    tasks = load("caltech101", tmp_path / "new", download=True, classes_per_task=2)
    assert len(tasks) == 2
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".caltech101.lock", "caltech101"]
    assert [path.name for path in (tmp_path / "new/caltech101").iterdir()] == ["101_ObjectCategories"]


def test_unreadable_image_is_named(load, flowers_dir: Path) -> None:
    path = flowers_dir / "flowers-102/jpg/image_00003.jpg"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"image_00003\.jpg"):
        load("flowers102", flowers_dir, classes_per_task=3)
    Image.new("RGB", (8, 8)).save(path)
    assert len(load("flowers102", flowers_dir, classes_per_task=3)) == 2
