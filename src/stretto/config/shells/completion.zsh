#compdef stretto rl sft vime trainer orchestrator inference
# Completion of stretto for zsh: source <(stretto completion zsh), after compinit
@TABLES@
__stretto_verbs='@VERBS@'
__stretto_plain='@PLAIN@'

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
    elif (( ${${(s: :)__stretto_plain}[(Ie)$verb]} )); then
        if [[ $cur == --* ]]; then
            compadd -- ${${(f)table}%% *}
        else
            [[ $prev == --* ]] && __stretto_values "$table" "${prev//_/-}" ''
            (( compstate[nmatches] )) || _files -g '*.(toml|json|jsonl|parquet)'
        fi
    elif [[ $cur == @* ]]; then
        compset -P '@'
        _files -g '*.(toml|json)'
    elif [[ $prev == @ ]]; then
        _files -g '*.(toml|json)'
    elif [[ $cur == --*=* ]]; then
        compset -P '*='
        __stretto_values "$table" "${${cur%%=*}//_/-}" ''
    elif [[ $cur == --* ]]; then
        PREFIX=${PREFIX//_/-}
        __stretto_keys "$table" "$PREFIX"
    elif [[ $prev == --* ]]; then
        __stretto_values "$table" "${prev//_/-}" ''
        (( compstate[nmatches] )) || [[ -z $cur ]] || _files -g '*.(toml|json|jsonl|parquet)'
    else
        compadd -S '' -- @ --
    fi
}
(( $+functions[compdef] )) && compdef _stretto stretto rl sft vime trainer orchestrator inference
