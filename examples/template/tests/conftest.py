"""The fixtures `run` and `sample`, and the marker `gpu`."""

pytest_plugins = ["tiles.testing.plugin"]
