"""The rank that gives its state to one that joins is lost meanwhile."""

import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import ronde.torch as hvd
from ronde.membership import own_member
from tests.cluster.training_rank import Descent

hvd.init()
number = own_member().number
model = torch.nn.Linear(4, 1).double()
optimizer = hvd.DistributedOptimizer(
    Descent(model.parameters(), 0.1), model.named_parameters()
)


class Fatal:
    def state_dict(self):
        # It is given last, when the others have all parameters.
        if number == 0 and loop.num_applied:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state):
        pass


data = torch.utils.data.TensorDataset(torch.randn(8, 4).double())
loop = hvd.elastic.Loop(
    model, optimizer, data, batch=8, epochs=1000000, objects={"fatal": Fatal()}
)
steps = []
for step in loop:
    ends = torch.zeros(1)
    with step:
        if number == 2 and step.number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        (inputs,) = step.inputs
        model(inputs).square().sum().backward()
        optimizer.step()
        steps.append(step.number)
        is_last = number == 1 and own_member().view.view >= 3 and len(steps) > 20
        ends = hvd.allreduce(torch.tensor([int(is_last)]), op=hvd.Max, name="ends")
    time.sleep(0.01)
    if ends.item():
        break
print("process", number, steps == list(range(steps[0], steps[-1] + 1)), steps[0])
sys.stdout.flush()
os._exit(0)
"""


def test_those_that_are_left_have_lost_no_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = ["run", "--nested", "-H", "localhost:3", "--min-ranks", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "ronde", *words, sys.executable, script, ROOT],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    # Step after step in the one that stayed, from the first on.
    text = f"{done.stdout}\n{done.stderr}"
    assert "process 1 True 0" in done.stdout, text
    assert "rank 0 on localhost was killed" in text, text
    assert "from the beginning" not in text, text
