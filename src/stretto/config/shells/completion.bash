# Completion of stretto for bash: source <(stretto completion bash)
@TABLES@
__stretto_verbs='@VERBS@'
__stretto_plain='@PLAIN@'

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
    elif [[ " $__stretto_plain " == *" $verb "* ]]; then
        if [[ $cur == --* ]]; then
            COMPREPLY=($(compgen -W "$(while read -r line; do echo "${line%% *}"; done <<< "$table")" -- "${cur//_/-}"))
            return
        fi
        [[ $prev == --* ]] && __stretto_values "$table" "${prev//_/-}" "$cur"
        [[ ${#COMPREPLY[@]} == 0 ]] && __stretto_files "$cur" toml json jsonl parquet
    elif [[ $cur == @ || $prev == @ || $cur == @* ]]; then
        __stretto_files "${cur#@}" toml json
        # An @ that touches the word is a word here, but a part of what readline replaces.
        if [[ ${COMP_LINE:0:COMP_POINT} == *@"${cur#@}" ]]; then
            local index
            for index in "${!COMPREPLY[@]}"; do
                [[ -d ${COMPREPLY[index]} ]] && { COMPREPLY[index]+=/; compopt -o nospace 2> /dev/null; }
                COMPREPLY[index]=@${COMPREPLY[index]}
            done
        fi
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
complete -F _stretto stretto rl sft vime trainer orchestrator inference
