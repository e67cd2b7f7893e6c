"""How far a long launch is: said on stderr, in one line that is rewritten on a terminal, now and then in one elsewhere."""

import os
import sys
import time

FIRST_LINE_SECONDS = 5  # seconds before anything is said
REDRAW_SECONDS = 0.5  # seconds between two states of a terminal's line


def wants_progress():
    """Is a progress line wanted? TILES_PROGRESS says so; by default it is, except in tests."""
    setting = os.environ.get("TILES_PROGRESS", "")
    return setting not in ("", "0") or (setting == "" and "PYTEST_CURRENT_TEST" not in os.environ)


class Progress:
    """The progress line of a launch of `count` clusters of `size` blocks: set how many are `done`, and `tick` now and then;
    `close` clears the line."""

    def __init__(self, title, count, size=1, stream=None, clock=time.monotonic):
        self.title, self.blocks, self.size, self.clock, self.finished = title, count * size, size, clock, 0
        self.stream = sys.stderr if stream is None else stream
        self.terminal = hasattr(self.stream, "isatty") and self.stream.isatty()
        self.start = clock()
        self.due, self.said = self.start + FIRST_LINE_SECONDS, False
        if not self.stream or not wants_progress():
            self.mute()

    def done(self, clusters):
        """Show that so many clusters have ended."""
        self.finished = clusters * self.size
        self.tick()

    def tick(self):
        """Show the progress if enough time has passed."""
        time = self.clock()
        if time >= self.due:
            self.say(time - self.start)
            self.due = (
                time + REDRAW_SECONDS if self.terminal else time + (time - self.start)
            )  # elsewhere at 5, 10, 20, 40, ... seconds

    def mute(self):
        """Write nothing from now on."""
        self.due = float("inf")

    def say(self, seconds):
        """Write a line to stderr."""
        line = f"{self.title}: {self.finished} of {self.blocks} blocks done, {seconds:.0f} s"
        if self.finished:
            line += f", about {seconds / self.finished * (self.blocks - self.finished):.0f} s to go"
        self.stream.write(f"\r{line}\x1b[K" if self.terminal else f"{line}\n")
        self.stream.flush()
        self.said = True

    def close(self):
        """The launch has ended, somehow."""
        if self.said and self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
