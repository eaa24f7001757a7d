from pathlib import Path

import pytest

from confitune.tasks import DATASETS, DataError, dataset_info, load_tasks

GREY = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def test_the_papers_settings() -> None:
    """Sec. 5.1: mini-batches of {128, 32, 32, 32} for {10, 50, 20, 10} epochs; 20, 10, 10 and 10 tasks."""
    paper = {n: (i.tasks, i.classes_per_task, i.batch_size, i.epochs) for n, i in DATASETS.items() if i.from_paper}
    assert paper == {
        "cifar100": (20, 5, 128, 10),
        "cub200": (10, 20, 32, 50),
        "caltech101": (10, 10, 32, 20),
        "flowers102": (10, 10, 32, 10),
    }


def test_unknown_names_lead_to_the_nearest() -> None:
    with pytest.raises(DataError, match="no dataset 'Flowers-102'; did you mean 'flowers102'"):
        load_tasks("Flowers-102", **GREY)
    with pytest.raises(DataError, match=r"there are cifar100, .*folder:PATH"):
        load_tasks("xyz", **GREY)
    with pytest.raises(DataError, match="write folder:PATH"):
        load_tasks("folder", **GREY)
    assert dataset_info("folder:somewhere").batch_size == 32


def test_bad_options_are_explained() -> None:
    with pytest.raises(DataError, match="digits has 5 tasks of 2 classes, so tasks=6 is impossible"):
        load_tasks("digits", tasks=6, **GREY)
    with pytest.raises(DataError, match="tasks=0 is impossible"):
        load_tasks("digits", tasks=0, **GREY)
    with pytest.raises(DataError, match="classes_per_task is 11, but there are only 10"):
        load_tasks("digits", classes_per_task=11, **GREY)
    with pytest.raises(DataError, match="classes_per_task is 0"):
        load_tasks("digits", classes_per_task=0, **GREY)
    with pytest.raises(DataError, match="no pipeline 'dirty'"):
        load_tasks("digits", pipeline="dirty", **GREY)
    with pytest.raises(DataError, match="digits has no 'published' pipeline"):
        load_tasks("digits", pipeline="published", **GREY)


def test_tasks_and_order_seed() -> None:
    whole = load_tasks("digits", **GREY)
    assert [t.classes for t in load_tasks("digits", tasks=2, **GREY)] == [t.classes for t in whole][:2]
    other = load_tasks("digits", order_seed=1, **GREY)
    assert [t.classes for t in other] != [t.classes for t in whole]
    assert load_tasks("digits", classes_per_task=3, **GREY).unused_classes == ("2",)


def test_folders_come_from_the_environment(flowers_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CONFITUNE_DATA", str(flowers_dir))
    monkeypatch.setenv("CONFITUNE_CACHE", str(tmp_path / "from_environment"))
    seen: list[tuple[str, int, int]] = []
    load_tasks("flowers102", classes_per_task=2, progress=lambda *call: seen.append(call), **GREY)
    assert seen == [("decoding flowers102", 60, 60)]
    assert len(list((tmp_path / "from_environment").glob("flowers102-clean-*.u8"))) == 1


def test_folders_default_to_the_users_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("CONFITUNE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path / ".cache/confitune/data/flowers-102")):
        load_tasks("flowers102", download=False, **GREY)
