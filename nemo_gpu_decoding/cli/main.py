"""Run `nemo-gpu-decoding COMMAND key=value ...` if its extras are installed; print a user's error as one line."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.checks import did_you_mean
from nemo_gpu_decoding.cli.options import OptionError, help_text, parse_options
from nemo_gpu_decoding.extras import require

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


# Name and summary of each command. Its module in this folder has `OPTIONS` (a dataclass), `EXAMPLES` (argument
# strings) and `run(options) -> int`. The optional attribute `POSITIONAL` names the option that arguments without
# `key=` belong to, `FIRST` the options that `--help` explains. The module is imported when its command is called,
# because most of them import torch or NeMo.
COMMANDS = {
    "transcribe": "audio files to text, with a beam, an LM and boosted phrases",
    "serve": "live streams to text: a WebSocket server with a page to try it on",
    "tune": "find LM, insertion and boosting weights on a dev manifest",
    "aliases": "what a model hears for phrases, as aliases in a phrase file",
    "build-graph": "a word LM to the graph that cuda_wfst searches, with a report",
    "build-lm": "text to an n-gram LM over words, or over the tokens of a model",
    "prune-lm": "an n-gram LM to a small one that is part of it",
    "pack-lm": "a word LM of any size to the file that paged_biglm maps into memory",
    "doctor": "what this machine has, and which path each strategy would take",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 2 for an error that the user can correct (one message on stderr); 1 for an internal error (traceback on
        stderr).
    """
    if argv is None and sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # names of files are UTF-8, also where the locale is C
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version", "version"):
        print(f"nemo-gpu-decoding {__version__}")
        return EXIT_OK
    return guarded(f"nemo-gpu-decoding {arguments[0]}", lambda: _dispatch(arguments[0], arguments[1:]))


def guarded(program: str, run: Callable[[], int], module: str = "nemo_gpu_decoding") -> int:
    """Run the program `module`, print errors as `main` does, and return the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, as by `>&-`, or there is no console
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # a console may lack letters of a text, or the name of a file is not UTF-8
        sys.stdout.reconfigure(errors="replace")
    try:
        return run()
    except BrokenPipeError:  # the reader of stdout has ended, as in `... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter flushes the rest to it)
        return EXIT_OK
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if is_mendable(error, module):
            print(f"{program}: {error}", file=sys.stderr)
            if isinstance(error, OptionError):
                print(f"see `{program} --help`", file=sys.stderr)
            return EXIT_USAGE
        traceback.print_exc()
        return EXIT_FAILURE


def overview() -> str:
    """Return the text of `nemo-gpu-decoding --help`."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: nemo-gpu-decoding COMMAND key=value ...\n\ncommands:\n{listed}\n\n"
        "`nemo-gpu-decoding COMMAND --help` explains the options of a command, `COMMAND --help all` every one."
    )


def is_mendable(error: Exception, module: str = "nemo_gpu_decoding") -> bool:
    """Return whether the user can correct an error: a ValueError, OSError or ImportError of this package or `module`.

    For such errors of other libraries, the cause is unknown, and the traceback is printed.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return True  # the system's own message names the file
    if not isinstance(error, (ValueError, OSError, ImportError)):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith(("nemo_gpu_decoding", module))


def _dispatch(name: str, given: list[str]) -> int:
    if name not in COMMANDS:
        raise ValueError(f"unknown command{did_you_mean(name, COMMANDS, '; did you mean {}?')}\n{overview()}")
    return run_program(f"nemo-gpu-decoding {name}", COMMANDS[name], load_command(name), given, partial(needed, name))


def run_program(
    program: str, summary: str, module: Any, arguments: Sequence[str], needs: Callable[..., Any] = lambda _: ()
) -> int:
    """Run a program, or print its help if an argument is `-h` or `--help`; return its exit code.

    Args:
        module: has the attributes that the modules of `COMMANDS` have.
        needs: options -> optional dependencies, as `require` takes them.
    """
    positional = getattr(module, "POSITIONAL", None)
    if any(argument in ("-h", "--help") for argument in arguments):
        first = () if "all" in arguments else getattr(module, "FIRST", ())
        print(help_text(program, summary, module.OPTIONS, module.EXAMPLES, positional, first))
        return EXIT_OK
    options = parse_options(module.OPTIONS, arguments, positional)
    require(*needs(options))
    from nemo_gpu_decoding.cli.decoding import OUTPUTS, check_outputs

    check_outputs(options)
    if not any(getattr(options, name, None) for name in (*OUTPUTS, "subtitles")):
        return int(module.run(options))
    with redirect_stdout(_Lasting(sys.stdout)) as stdout, redirect_stderr(_Lasting(sys.stderr)):
        code = int(module.run(options))
        stdout.flush()
        return code


class _Lasting:
    """A wrapper of stdout or stderr that silently discards output after the pipe was closed or the disk was full."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return partial(self._going_on, found) if name in ("write", "flush") else found

    def _going_on(self, method: Callable[..., Any], *arguments: str) -> Any:
        try:
            return method(*arguments)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # buffered output is also discarded
            if not isinstance(error, BrokenPipeError):
                print(f"the rest of {self._stream.name.strip('<>')} is lost: {error}", file=sys.stderr)


def file_of(name: str) -> str:
    """Return the name of the Python module that implements a command."""
    return "lm" if name.endswith("-lm") else name.replace("-", "_")


def load_command(name: str) -> Any:
    """Import the module of a command; return the module or, if it has a table `COMMANDS`, the command's entry."""
    module = importlib.import_module(f"nemo_gpu_decoding.cli.{file_of(name)}")
    return getattr(module, "COMMANDS", {}).get(name, module)


# ------------------------------------------------------- optional dependencies, checked before a command starts


def needed(command: str, options: Any) -> list[str]:
    """Return the extras, or single modules, that a command needs with these options, in the form for `require`."""
    return [name for name, is_needed in NEEDS.get(command, {}).items() if is_needed(options)]


def always(options: Any) -> bool:
    return True


def has_sentencepiece_model(options: Any) -> bool:
    return options.tokenizer is not None and options.tokenizer.endswith(".model")


def starts_ray(options: Any) -> bool:
    from nemo_gpu_decoding.cli.transcribe import workers_of

    return workers_of(options).address is not None


def builds_word_graph(options: Any) -> bool:
    """Return whether the command builds a word graph from an ARPA file, which needs kaldifst."""
    if options.strategy is None and options.preset is None:
        return False  # the default strategies search no word graph
    from nemo_gpu_decoding.cli.decoding import decoding_config, with_decoding
    from nemo_gpu_decoding.nemo_plugin.register import find_strategy

    preset = decoding_config(options.strategy, options.preset, {"lm": options.lm})
    config = with_decoding(preset, options) if hasattr(options, "decoding") else preset
    strategy = find_strategy(config)
    if strategy is None or strategy.section != "wfst":
        return False
    ready_made = config.wfst.get("wfst_lm_path")
    return bool(config.wfst.get("arpa_lm_path")) and not (ready_made and Path(ready_made).expanduser().exists())


# command -> extra or module -> function of the options: is it needed? Other commands need none
NEEDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "transcribe": {"nemo": always, "kaldifst": builds_word_graph, "cluster": starts_ray},
    "serve": {"nemo": always, "serve": always, "kaldifst": builds_word_graph},
    "tune": {"nemo": always, "kaldifst": builds_word_graph, "plot": attrgetter("plot")},
    "aliases": {"nemo": always, "kaldifst": builds_word_graph},
    "build-graph": {"nemo": attrgetter("model"), "kaldifst": always, "sentencepiece": has_sentencepiece_model},
    "build-lm": {"nemo": attrgetter("model"), "sentencepiece": has_sentencepiece_model},
}


if __name__ == "__main__":
    sys.exit(main())
