"""What a measurement of training steps is asked for."""

from dataclasses import dataclass
from enum import StrEnum

from ronde.bench.training.catalogue import MODELS, ModelFacts, Unit
from ronde.errors import UsageError


class Dtype(StrEnum):
    """What forward computes in; bfloat16 is autocast, the weights stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceKind(StrEnum):
    """Where models train; auto takes CUDA where there is a device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class OptimizerKind(StrEnum):
    """What updates the weights."""

    SGD = "sgd"
    ADAM = "adam"


class WireFormat(StrEnum):
    """What gradients travel as."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


class InputKind(StrEnum):
    """Where a step's batch comes from; all data is synthetic.

    PREPARED takes batches in turn that were made before. GATHERED puts each together
    from random samples of a pool in memory, as a data loader does.
    """

    PREPARED = "prepared"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to measure.

    Attributes:
        model: The model.
        batch: Samples a step of one rank, in every variant.
        rounds: Blocks of steps of each variant; figures are medians over them.
        steps: Steps of a block; None takes as many as last about 0.4 s.
        warmup: Steps of each model before anything is timed.
        dtype: What forward computes in.
        device: Where to train.
        optimizer: What updates the weights.
        compression: What gradients travel as.
        input: Where batches come from.
        engine: What moves the gradients; empty takes the environment's.
        is_channels_last: Lay images and weights out with the channels last.
        is_compiled: Let ``torch.compile`` compile the model.
    """

    model: ModelFacts
    batch: int
    rounds: int = 5
    steps: int | None = None
    warmup: int = 3
    dtype: Dtype = Dtype.FLOAT32
    device: DeviceKind = DeviceKind.AUTO
    optimizer: OptimizerKind = OptimizerKind.SGD
    compression: WireFormat = WireFormat.NONE
    input: InputKind = InputKind.PREPARED
    engine: str = ""
    is_channels_last: bool = False
    is_compiled: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: A number is below its least, or the layout is not the model's.
        """
        least = {"batch": 1, "rounds": 1, "steps": 1, "warmup": 0}
        for name, value in least.items():
            given: int | None = getattr(self, name)
            if given is not None and given < value:
                raise UsageError(
                    f"{name} must be at least {value}, got {given}. "
                    f"Type: --{name} {max(value, 1)}"
                )
        has_channels = self.model.unit is Unit.IMAGES
        has_channels = has_channels and len(self.model.sample_shape) == 3
        if self.is_channels_last and not has_channels:
            raise UsageError(
                f"model must take images with channels for channels-last, got "
                f"{self.model.name}. Leave --channels-last out."
            )


def find_model(name: str) -> ModelFacts:
    """Return what is known of a model.

    Raises:
        UsageError: There is no such model.
    """
    if name not in MODELS:
        raise UsageError(
            f"model must be one of {', '.join(sorted(MODELS))}, got {name!r}. "
            "Type: ronde bench train --help"
        )
    return MODELS[name]
