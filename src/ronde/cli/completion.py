"""``ronde completion``: a script that completes command lines in bash, zsh or fish."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO

from ronde.arguments import CommandParser
from ronde.cli.entry import VERBS, main
from ronde.cli.help import RUN_HELP

_HELP = """\
usage: ronde completion bash|zsh|fish

Print a script that completes verbs, options, values and files. It starts no Python.

options:
  -h, --help  show this help and exit

examples:
  source <(ronde completion bash)       in ~/.bashrc; zsh: in ~/.zshrc, behind compinit
  ronde completion fish > ~/.config/fish/completions/ronde.fish
"""
_USAGE = re.compile(r"(?m)^(?:usage:|      ) (ronde(?: [a-z]+(?!\S))*)((?: \S+)*)")
_FILES = "<files>"  # any file; it stands behind other words, and options behind both
_WALK = """\
# Sets list to what may come next. The last argument is the word at the cursor.
_ronde_walk() {
    local command=ronde value= word
    while word=$1 && shift && (($#)); do
        if [[ -n $value && $word != -* ]]; then value=
        elif _ronde_find "$command $word"; then
            [[ $word == -* ]] && value=" $word" || command+=" $word"
        elif [[ $word == -- ]] || [[ $word != -* ]] && _ronde_find "$command <program>"
        then list=' <files>' && return
        else value=; fi
    done
    case $word in --*=*) value=" ${word%%=*}" ;; -*) value= ;; esac
    _ronde_find "$command$value" || list=
    [[ -z $value && $word == -* ]] && list=${list#"${list%% -*}"} || list=${list%% -*}
}
"""
_ENDS = {
    "bash": """\
_ronde() {
    local list word last words=()
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do # bash divides words at : and =
        [[ $word == [:=]* || $last == [:=] ]] && words[-1]+=$word || words+=("$word")
        last=$word
    done
    _ronde_walk "${words[@]}"
    COMPREPLY=($(compgen -W "${list% <files>}" -- "${words[-1]##*=}"))
    [[ $list != *' <files>' ]] || compopt -o default 2>/dev/null
}
complete -F _ronde ronde
""",
    "zsh": """\
_ronde() {
    local list
    _ronde_walk "${(@)words[1,CURRENT-1]}" "$PREFIX"
    compset -P '--*='
    compadd -- ${=list% <files>}
    [[ $list != *' <files>' ]] || _files
}
compdef _ronde ronde
""",
    "fish": """\
_ronde_walk "$@"; for word in $list; do echo "$word"; done'
function __ronde
    set -l at (commandline -ct)
    for each in (bash -c $__ronde bash (commandline -opc) $at)
        test $each = '<files>'; and __fish_complete_path $at; or echo $each
    end
end
complete -c ronde -f -a '(__ronde)'
""",
}


def list_words() -> Mapping[str, set[str]]:
    """Return the words that may follow each command, and each option with a value.

    All are read from the help of the commands, which declares the options.
    """
    found: dict[str, set[str]] = defaultdict(set)
    found["ronde"] = {"--version", *VERBS}
    found["ronde completion"] = {*_ENDS}
    commands = [*(f"ronde {verb}" for verb in VERBS), "ronde topo show"]
    for command in commands:  # which grows
        with redirect_stdout(StringIO()) as out:
            main([*command.split()[1:], "--help"])
        text = out.getvalue().replace(": horovodrun", ": ronde horovodrun")
        usages = _USAGE.findall(text)
        for usage, rest in usages:
            above, _, verb = usage.rpartition(" ")
            commands += [usage] if usage not in commands else []
            found[above].add(verb)
            if " program" in rest:  # behind it nothing is ronde's
                found[f"{usage} <program>"] = {_FILES}
            has_files = re.search("[A-Z]| program", re.sub(r"-\S+ [A-Z]+", "", rest))
            found[usage] |= {_FILES} if has_files else set()
        _add_options(found, usages[0][0], text)
    for verb in ("profile", "horovodrun"):
        _add_options(found, f"ronde {verb}", RUN_HELP)
    return found


def _add_options(found: dict[str, set[str]], command: str, text: str) -> None:
    for option, action in CommandParser(command, text).options.items():
        found[command].add(option)
        if action.nargs != 0:
            value = str(action.metavar)
            values = value[1:-1].split(",") if value.startswith("{") else []
            is_file = re.search("DIR|FILE|PATH|SOURCE", value)
            found[f"{command} {option}"] = {_FILES} if is_file else {*values}


def write_script(shell: str) -> str:
    cases = ""
    for key, words in list_words().items():
        ordered = sorted(words, key=lambda w: (w.startswith("-"), w == _FILES, w))
        cases += f"    '{key}') list='{''.join(f' {w}' for w in ordered)}' ;;\n"
    script = f"_ronde_find() {{ case $1 in\n{cases}    *) return 1 ;; esac; }}\n{_WALK}"
    if shell == "fish":
        script = "set -g __ronde '" + re.sub(r"([\\'])", r"\\\1", script)
    return script + _ENDS[shell]


def run(words: Sequence[str]) -> int:
    if len(words) == 1 and words[0] in _ENDS:
        print(write_script(words[0]), end="")
    else:
        CommandParser("ronde completion", _HELP).read(words or ["--help"])
    return 0
