//! What gpu-admission, the scheduler extender of gpu-manager, leaves on a pod. Read so that both systems can work in
//! one cluster while it is moved over; never written.

/// Pod annotation with the node that gpu-admission picked.
const NODE: &str = "tencent.com/predicate-node";

/// Pod annotations with the GPUs of the container of that index in `spec.containers`: `0` or `0,1`, the minor
/// numbers of the device nodes.
const GPUS: &str = "tencent.com/predicate-gpu-idx-";

/// No node has more GPUs than this.
const GPUS_MAX: usize = 64;

/// The minor numbers of the GPUs that gpu-admission picked, where the annotations of the pod say it beyond doubt: they
/// name one container's GPUs, or the same for all. It names containers by index, which a node does not know.
///
/// `node` is the node that the pod is on, where the caller knows it: a choice for another node, left by a bind that
/// failed, is none.
pub fn gpu_admission_minors<'a>(
    node: Option<&str>,
    annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Option<Vec<u32>> {
    let mut picked_node = None;
    let mut picked: Option<&str> = None;
    for (key, value) in annotations {
        if key == NODE {
            picked_node = Some(value);
        } else if key.starts_with(GPUS) {
            if picked.is_some_and(|other| other != value) {
                return None;
            }
            picked = Some(value);
        }
    }
    if node.is_some() && node != picked_node {
        return None;
    }
    let mut minors: Vec<u32> = Vec::new();
    for minor in picked?.split(',') {
        // Digits only: `parse` takes a sign, too.
        let digits = minor.bytes().all(|c| c.is_ascii_digit());
        let minor = minor.parse().ok().filter(|minor| digits && !minors.contains(minor))?;
        minors.push(minor);
        if minors.len() > GPUS_MAX {
            return None;
        }
    }
    Some(minors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minors(node: Option<&str>, annotations: &[(&str, &str)]) -> Option<Vec<u32>> {
        gpu_admission_minors(node, annotations.iter().copied())
    }

    #[test]
    fn a_choice_for_this_node_is_read() {
        let one = [
            ("tencent.com/gpu-assigned", "false"),
            ("tencent.com/predicate-gpu-idx-0", "3"),
            ("tencent.com/predicate-node", "a"),
            ("tencent.com/predicate-time", "1700000000000000000"),
        ];
        assert_eq!(minors(Some("a"), &one), Some(vec![3]));
        assert_eq!(minors(None, &one), Some(vec![3]));
        assert_eq!(minors(Some("b"), &one), None);
        let whole = [("tencent.com/predicate-gpu-idx-1", "0,1"), ("tencent.com/predicate-node", "a")];
        assert_eq!(minors(Some("a"), &whole), Some(vec![0, 1]));
    }

    #[test]
    fn what_is_missing_in_doubt_or_malformed_is_no_choice() {
        let idx = "tencent.com/predicate-gpu-idx-0";
        assert_eq!(minors(None, &[]), None);
        assert_eq!(minors(Some("a"), &[(idx, "0")]), None);
        for bad in ["", "x", "-1", "0,", "0,0", "4294967296"] {
            assert_eq!(minors(None, &[(idx, bad)]), None, "{bad}");
        }
        let other = "tencent.com/predicate-gpu-idx-1";
        assert_eq!(minors(None, &[(idx, "0"), (other, "1")]), None);
        assert_eq!(minors(None, &[(idx, "0"), (other, "0")]), Some(vec![0]));
    }
}
