"""Lightning, accelerate and Hugging Face's Trainer train on ronde, unmodified."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

DATA = """
import sys
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=16)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def report(model):
    group = type(distributed.group.WORLD).__name__
    inputs = torch.ones(1, 8)
    sys.stdout.write(f"{group} {model(inputs).item():.6f}\\n")
    sys.stdout.flush()

"""
TRAINER = """
import lightning
from lightning.pytorch.strategies import DDPStrategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return optimizer


trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="ronde"),
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    use_distributed_sampler=True,
)
trainer.fit(Module(), loader)
report(model)
"""
ACCELERATE = """
distributed.init_process_group("ronde")
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
assert accelerator.gather(torch.ones(1)).tolist() == [1.0, 1.0]
report(model)
accelerator.end_training()
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        outputs = self.model(x)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


arguments = TrainingArguments(
    output_dir="output", use_cpu=True, ddp_backend="gloo", learning_rate=0.05,
    per_device_train_batch_size=16, max_steps=8, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_strategy="no", optim="sgd",
    lr_scheduler_type="constant", max_grad_norm=0,
)
rows = [{"x": x, "labels": y} for x, y in data]
Trainer(Module(), arguments, train_dataset=rows).train()
report(model)
"""
RUN = (sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix")


@pytest.mark.parametrize(
    ("program", "options"),
    [
        pytest.param(ACCELERATE, (), id="accelerate"),  # which is imported soonest
        pytest.param(TRAINER, (), id="lightning", marks=pytest.mark.soak),
        pytest.param(
            *(TRANSFORMERS, ("--replace-gloo",)),
            id="transformers",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_trains_unmodified(
    program: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(DATA + program)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # noqa: TID251
    done = subprocess.run(
        [*RUN, *options, "--", sys.executable, str(path)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [line for line in done.stdout.splitlines() if line.startswith("Ronde")]
    groups, outputs = zip(*map(str.split, reports), strict=True)
    assert groups == ("RondeProcessGroup",) * 2
    assert outputs[0] == outputs[1]  # the weights are the same
    assert 4.0 < float(outputs[0]) < 9.0, "it has begun to learn the sum of ones, 8"
