# Sourced by scripts whose work takes long: what they do not know is told before it begins.
#
# usage KNOWN ARGUMENT...: -h and --help print the comment at the head of the script and end it; an argument that is not among
# the words of KNOWN is an error. A word that ends in = is an option with a value, of its own or after a =.
usage() {
    local known=" $1 " argument value= wrong=
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
        if [ -n "$value" ]; then
            value=
        elif [[ $known == *" $argument= "* ]]; then
            value=$argument
        elif [[ $known != *" $argument "* && $known != *" ${argument%%=*}= "* ]]; then
            wrong="$argument is not known here"
            break
        fi
    done
    wrong=${wrong:-${value:+$value has no value}}
    if [ -n "$wrong" ]; then
        printf '%s: %s; see %s --help\n' "${0##*/}" "$wrong" "$0" >&2
        exit 2
    fi
}
