"""`stretto completion SHELL`: a script that completes verbs, keys, values and files, for bash, zsh and fish.

The script holds a table of all keys, made from the config classes when it is printed; pressing Tab starts no Python. A
key is completed part by part, `--trainer.` before `--trainer.optim.`, as directories are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stretto.config.section import Key, Section, all_paths, tag_of

OWN_COMMANDS = ("rl", "sft", "trainer", "orchestrator", "inference")
"""Verbs that are commands too. `eval` is the shell's own."""


def completion_script(shell: str, roots: Mapping[str, type[Section]], verbs: Sequence[str]) -> str:
    """The script for one of SHELLS.

    roots: the root of every verb that has a configuration; verbs: all of them.
    """
    tables = {verb: _flags(cls) for verb, cls in roots.items()}
    return SHELLS[shell].replace("@TABLES@", TABLES[shell](tables)).replace("@VERBS@", " ".join(verbs))


def _flags(cls: type[Section]) -> list[str]:
    """`--key value value ...` for every key of a root, with the values it can have where these are few."""
    values: dict[str, dict[str, None]] = {}
    for path, section, key in all_paths(cls):
        flag = path.replace("_", "-")
        if key.item_sections or (key.sections and not key.is_nullable):
            continue  # completed by the keys in it
        known = values.setdefault(f"--{flag}", {})
        known.update(dict.fromkeys(_values(key, section)))
        if key.is_bool:
            values.setdefault(f"--no-{flag}", {})
    return [" ".join([flag, *known]) for flag, known in values.items()]


def _values(key: Key, section: type[Section]) -> Iterable[str]:
    if key.name == "type" and (tag := tag_of(section)) is not None:
        return [tag]
    choices = [str(choice) for choice in key.choices]
    return choices + ["true", "false"] * key.is_bool + ["None"] * (key.is_nullable and bool(choices))


def _shell_tables(tables: Mapping[str, Sequence[str]]) -> str:
    """A variable per verb, one line per key."""
    return "\n".join("__stretto_{}='{}'".format(verb, "\n".join(flags)) for verb, flags in tables.items())


def _fish_tables(tables: Mapping[str, Sequence[str]]) -> str:
    """A list per verb, one item per key."""
    return "\n".join(
        "set -g __stretto_{} {}".format(verb, " ".join(f"'{flag}'" for flag in flags))
        for verb, flags in tables.items()
    )


BASH = r"""# Completion of stretto for bash: source <(stretto completion bash)
@TABLES@
__stretto_verbs='@VERBS@'

__stretto_values() {  # the values of flag $2 in table $1 that begin with $3
    local line
    while read -r line; do
        if [[ ${line%% *} == "$2" ]]; then
            [[ $line == *' '* ]] && COMPREPLY=($(compgen -W "${line#* }" -- "$3"))
            return
        fi
    done <<< "$1"
}

__stretto_keys() {  # the keys of table $1 that begin with $2, up to the next dot
    local line rest
    local -A seen=()
    while read -r line; do
        line=${line%% *}
        if [[ $line == "$2"* ]]; then
            rest=${line#"$2"}
            [[ $rest == *.* ]] && line=$2${rest%%.*}.
            [[ -z ${seen[$line]} ]] && { seen[$line]=1; COMPREPLY+=("$line"); }
        fi
    done <<< "$1"
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace 2> /dev/null
}

__stretto_files() {  # directories, and files with the endings $2...
    local word=$1 ending
    shift
    COMPREPLY=($(compgen -d -- "$word"))
    for ending in "$@"; do COMPREPLY+=($(compgen -f -X "!*.$ending" -- "$word")); done
    compopt -o filenames 2> /dev/null
}

_stretto() {
    local IFS=$' \t\n'
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} verb=${COMP_WORDS[0]##*/}
    COMPREPLY=()
    if [[ $verb == stretto ]]; then
        if [[ $COMP_CWORD == 1 ]]; then
            COMPREPLY=($(compgen -W "$__stretto_verbs" -- "$cur"))
            return
        fi
        verb=${COMP_WORDS[1]}
    fi
    local name=__stretto_$verb
    local table=${!name}
    if [[ $verb == completion ]]; then
        COMPREPLY=($(compgen -W 'bash zsh fish' -- "$cur"))
    elif [[ -z $table ]]; then
        __stretto_files "$cur"
    elif [[ $cur == @ || $prev == @ || $cur == @* ]]; then
        local word=${cur#@}
        __stretto_files "$word" toml json
        [[ $cur == @?* ]] && COMPREPLY=("${COMPREPLY[@]/#/@}")
    elif [[ $cur == '=' ]]; then
        __stretto_values "$table" "${prev//_/-}" ''
    elif [[ $prev == '=' ]]; then
        __stretto_values "$table" "${COMP_WORDS[COMP_CWORD - 2]//_/-}" "$cur"
    elif [[ $cur == --* ]]; then
        __stretto_keys "$table" "${cur//_/-}"
    elif [[ $prev == --* ]]; then
        __stretto_values "$table" "${prev//_/-}" "$cur"
        [[ ${#COMPREPLY[@]} == 0 && -n $cur ]] && __stretto_files "$cur" toml json jsonl parquet
    elif [[ -z $cur ]]; then
        COMPREPLY=('@' '--')
        compopt -o nospace 2> /dev/null
    fi
}
complete -F _stretto stretto rl sft trainer orchestrator inference
"""

ZSH = r"""#compdef stretto rl sft trainer orchestrator inference
# Completion of stretto for zsh: source <(stretto completion zsh), after compinit
@TABLES@
__stretto_verbs='@VERBS@'

__stretto_values() {  # the values of flag $2 in table $1, with the text $3 before each
    local line
    for line in ${(f)1}; do
        if [[ ${line%% *} == $2 ]]; then
            [[ $line == *' '* ]] && compadd -p "$3" -- ${(s: :)${line#* }}
            return
        fi
    done
}

__stretto_keys() {  # the keys of table $1 that begin with $2, up to the next dot
    local line rest
    local -aU whole parts
    for line in ${(f)1}; do
        line=${line%% *}
        if [[ $line == "$2"* ]]; then
            rest=${line#"$2"}
            if [[ $rest == *.* ]]; then parts+=("$2${rest%%.*}."); else whole+=("$line"); fi
        fi
    done
    (( $#whole )) && compadd -- $whole
    (( $#parts )) && compadd -S '' -- $parts
}

_stretto() {
    local cur=${words[CURRENT]} prev=${words[CURRENT - 1]} verb=${words[1]:t}
    if [[ $verb == stretto ]]; then
        if (( CURRENT == 2 )); then
            compadd -- ${(s: :)__stretto_verbs}
            return
        fi
        verb=${words[2]}
    fi
    local name=__stretto_$verb
    local table=${(P)name}
    if [[ $verb == completion ]]; then
        compadd bash zsh fish
    elif [[ -z $table ]]; then
        _files
    elif [[ $cur == @* ]]; then
        compset -P '@'
        _files -g '*.(toml|json)'
    elif [[ $prev == @ ]]; then
        _files -g '*.(toml|json)'
    elif [[ $cur == --*=* ]]; then
        compset -P '*='
        __stretto_values "$table" "${${cur%%=*}//_/-}" ''
    elif [[ $cur == --* ]]; then
        __stretto_keys "$table" "${cur//_/-}"
    elif [[ $prev == --* ]]; then
        __stretto_values "$table" "${prev//_/-}" ''
        (( compstate[nmatches] )) || [[ -z $cur ]] || _files
    else
        compadd -S '' -- @ --
    fi
}
(( $+functions[compdef] )) && compdef _stretto stretto rl sft trainer orchestrator inference
"""

FISH = r"""# Completion of stretto for fish: stretto completion fish | source
@TABLES@
set -g __stretto_verbs @VERBS@

function __stretto_files
    for path in $argv[1]*/ $argv[1]*.toml $argv[1]*.json
        echo $path
    end
end

function __stretto_complete
    set -l words (commandline -opc)
    set -l cur (commandline -ct)
    set -l prev $words[-1]
    set -l verb (string replace -r '.*/' '' -- $words[1])
    if test $verb = stretto
        if test (count $words) -eq 1
            printf '%s\n' $__stretto_verbs
            return
        end
        set verb $words[2]
    end
    if test $verb = completion
        printf '%s\n' bash zsh fish
        return
    end
    set -l name __stretto_$verb
    if not set -q $name
        __fish_complete_directories $cur ''
        return
    end
    set -l table $$name
    if test "$prev" = @
        __stretto_files $cur
    else if string match -q -- '@*' $cur
        printf '@%s\n' (__stretto_files (string sub -s 2 -- $cur))
    else if string match -q -- '--*=*' $cur
        set -l flag (string replace -r '=.*' '' -- $cur)
        for line in $table
            set -l parts (string split ' ' -- $line)
            if test $parts[1] = (string replace -a _ - -- $flag); and set -q parts[2]
                printf "$flag=%s\n" $parts[2..-1]
            end
        end
    else if string match -q -- '--*' $cur
        set -l length (string length -- $cur)
        for line in $table
            set -l flag (string split ' ' -- $line)[1]
            if string match -q -- "$cur*" $flag
                set -l rest (string sub -s (math $length + 1) -- $flag)
                if string match -q -- '*.*' $rest
                    echo $cur(string split . -- $rest)[1].
                else
                    echo $flag
                end
            end
        end | sort -u
    else if string match -q -- '--*' $prev
        for line in $table
            set -l parts (string split ' ' -- $line)
            if test $parts[1] = (string replace -a _ - -- $prev); and set -q parts[2]
                printf '%s\n' $parts[2..-1]
            end
        end
    else
        printf '%s\n' @ --
    end
end
for command in stretto rl sft trainer orchestrator inference
    complete -c $command -f -a '(__stretto_complete)'
end
"""

SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
TABLES = {"bash": _shell_tables, "zsh": _shell_tables, "fish": _fish_tables}
