# Sourced by scripts whose work takes long: what they do not know is told before it begins.

# styled CODE TEXT: a line, in that style of ECMA-48 (1 bold, 2 faint) where it is read on a terminal.
styled() {
    if [ -t 1 ]; then printf '\033[%sm%s\033[0m\n' "$1" "$2"; else printf '%s\n' "$2"; fi
}

# working WHAT COMMAND...: runs a command that says nothing of how far it is; a line tells every half minute that it is at work.
working() {
    local what=$1 begun=$SECONDS ticker status=0
    shift
    while sleep 30 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        styled 2 "$what: $((SECONDS - begun)) s so far" >&2
    done &
    ticker=$!
    "$@" || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    return "$status"
}

# usage KNOWN ARGUMENT...: -h and --help print the comment at the head of the script and end it; an argument that is not among
# the words of KNOWN is an error. A word with a = is an option with a value, of its own or after a =: one of those that the
# word lists after it, as in --output=text|json, a whole number from 1 on for N, or any where it lists none.
usage() {
    local known=" $1 " argument option= values value wrong=
    shift
    for argument; do
        case $argument in
            -h | --help)
                sed -n '2,/^[^#]/ { s/^# \{0,1\}//p }' "$0"
                exit 0
                ;;
        esac
    done
    for argument; do
        if [ -n "$option" ]; then
            value=$argument
        elif [[ $argument != *=* && $known == *" $argument="* ]]; then
            option=$argument
            continue
        elif [[ $argument == *=* && $known == *" ${argument%%=*}="* ]]; then
            option=${argument%%=*} value=${argument#*=}
        elif [[ $known == *" $argument "* ]]; then
            continue
        else
            wrong="$argument is not known here"
            break
        fi
        values=${known#*" $option="}
        values=${values%% *}
        if [ "$values" = N ]; then
            if [[ ! $value =~ ^0*[1-9][0-9]{0,8}$ ]]; then
                wrong="$option cannot be $value; it is a number from 1 to 999999999"
                break
            fi
        elif [[ -n $values && ($value == *"|"* || "|$values|" != *"|$value|"*) ]]; then
            wrong="$option cannot be $value; it is ${values//|/ or }"
            break
        fi
        option=
    done
    wrong=${wrong:-${option:+$option has no value}}
    if [ -n "$wrong" ]; then
        printf '%s: %s; see %s --help\n' "${0##*/}" "$wrong" "$0" >&2
        exit 2
    fi
}

# space GB: ends the script where the build folder cannot grow to that size, in GB of 10^9 bytes. A linker that runs out of space says so
# in many words, and tests that could not be built count as failed.
space() {
    local folder=${CARGO_TARGET_DIR:-$PWD/target} free held
    mkdir -p "$folder"
    free=$(df --output=avail -B 1 "$folder" | tail -n 1)
    held=$(du -s -B 1 "$folder" | cut -f 1)
    if [ $((free + held)) -lt $(($1 * 1000000000)) ]; then
        printf '%s: %s can grow to %d GB, and needs to hold %d; free some disk, or have CARGO_TARGET_DIR name another folder\n' \
            "${0##*/}" "$folder" $(((free + held) / 1000000000)) "$1" >&2
        exit 1
    fi
}
