//! What is mounted, by `/proc/PID/mountinfo`.

/// The mount point of one line: its fifth field (proc_pid_mountinfo(5)).
pub fn mount_point(line: &str) -> Option<&str> {
    line.split(' ').nth(4)
}
