# Completion of stretto for fish: stretto completion fish | source
@TABLES@
set -g __stretto_verbs @VERBS@
set -g __stretto_plain @PLAIN@

function __stretto_files  # directories, and files with the endings $argv[2..-1]
    for path in $argv[1]*/ $argv[1]*.$argv[2..-1]
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
    if contains -- $verb $__stretto_plain
        if string match -q -- '--*' $cur
            for line in $table
                string split ' ' -- $line | head -n 1
            end
            return
        end
        set -l known
        for line in $table
            set -l parts (string split ' ' -- $line)
            if test $parts[1] = (string replace -a _ - -- "$prev"); and set -q parts[2]
                set known $parts[2..-1]
            end
        end
        if set -q known[1]
            printf '%s\n' $known
        else
            __stretto_files "$cur" toml json jsonl parquet
        end
        return
    end
    if test "$prev" = @
        __stretto_files "$cur" toml json
    else if string match -q -- '@*' $cur
        printf '@%s\n' (__stretto_files "$(string sub -s 2 -- $cur)" toml json)
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
        set -l known
        for line in $table
            set -l parts (string split ' ' -- $line)
            if test $parts[1] = (string replace -a _ - -- $prev); and set -q parts[2]
                set known $parts[2..-1]
            end
        end
        if set -q known[1]
            printf '%s\n' $known
        else if test -n "$cur"
            __stretto_files "$cur" toml json jsonl parquet
        end
    else
        printf '%s\n' @ --
    end
end
for command in stretto rl sft vime trainer orchestrator inference
    complete -c $command -f -a '(__stretto_complete)'
end
