#!/usr/bin/env bash
# tmux.sh [-s SESSION] [-o OUTPUT_DIR]: a tmux session for runs below OUTPUT_DIR.
# The pane Trainer is a shell to start them from; Orchestrator and Inference follow their newest log. Ctrl-C there gives a
# shell too, to start a process by hand.
set -euo pipefail

session=stretto output=outputs
while getopts "s:o:h" option; do
    case $option in
        s) session=$OPTARG ;;
        o) output=$OPTARG ;;
        *) sed -n '2,4s/^# //p' "$0"; [ "$option" = h ]; exit ;;
    esac
done
command -v tmux >/dev/null || { echo "error: tmux is not installed" >&2; exit 2; }

if tmux has-session -t "=$session" 2>/dev/null; then
    echo "session $session exists; end it with: tmux kill-session -t $session" >&2
else
    follow() { # PANE LOG: wait for the first run, then show the newest log and go on with it
        local found="'$output'/*/logs/$2*.log"
        tmux send-keys -t "$1" -l "until ls $found >/dev/null 2>&1; do sleep 1; done; tail -n +1 -F \"\$(ls -t $found | head -n 1)\""
        tmux send-keys -t "$1" Enter
    }
    pane() { # TITLE: a pane below the first; prints its name
        local name
        name=$(tmux split-window -d -v -P -F '#{pane_id}' -t "=$session:")
        tmux select-pane -t "$name" -T "$1"
        tmux select-layout -t "=$session:" even-vertical >/dev/null
        echo "$name"
    }
    first=$(tmux new-session -d -x 160 -y 60 -P -F '#{pane_id}' -s "$session" -n runs)
    tmux select-pane -t "$first" -T Trainer
    tmux set-option -t "$session" pane-border-status top >/dev/null
    tmux set-option -t "$session" pane-border-format ' #{pane_title} ' >/dev/null
    follow "$(pane Inference)" inference
    follow "$(pane Orchestrator)" orchestrator
fi
if [ -t 1 ]; then
    exec tmux attach-session -t "=$session"
fi
