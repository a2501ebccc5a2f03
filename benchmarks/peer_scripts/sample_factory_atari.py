"""Starts Sample Factory's own Atari example (sf_examples.atari), with the names of games that it asks for.

Current releases of ale-py register the old names (PongNoFrameskip-v4) only on request. Its workers are new processes
that load this file again under another name, so it asks there too. All settings come from the command line.
"""

import sys

from ale_py.registration import register_v0_v4_envs
from sf_examples.atari.train_atari import main

register_v0_v4_envs()

if __name__ == "__main__":
    sys.exit(main())
