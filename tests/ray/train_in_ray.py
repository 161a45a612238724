"""The digits example inside Ray Train: ``train_in_ray.py EXAMPLES RECORD STORAGE``.

The last line of the output has each worker's variables of a launcher after the end.
"""

import sys


def train(config):
    """Run the example on one worker."""
    sys.path.insert(0, config["examples"])
    sys.argv = ["digits.py", *config["options"]]
    import digits

    digits.main()


def main():
    """Train on two workers, each on a node of its own."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    import ray
    from ronde.ray import RondeConfig

    examples, record, storage = sys.argv[1:]
    ray.init(address="auto", runtime_env={"env_vars": {"RONDE_ENGINE": "gloo"}})
    TorchTrainer(
        train,
        train_loop_config={
            "examples": examples,
            "options": ["--epochs", "2", "--json", record],
        },
        torch_config=RondeConfig(),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=storage),
    ).fit()


if __name__ == "__main__":
    main()
