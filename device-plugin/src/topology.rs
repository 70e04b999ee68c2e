//! From who is connected with whom to groups of GPUs that are equally well connected. Pure; it knows no NVML.

use std::collections::BTreeSet;

use vcuda_config::Link;

/// GPUs by their positions.
pub type Members = Vec<usize>;

/// How two GPUs are connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Between {
    /// Direct NVLinks.
    pub nvlinks: u32,
    /// They are behind one PCIe switch.
    pub one_switch: bool,
    /// They are behind PCIe switches, without a host bridge between them.
    pub switches: bool,
}

/// Groups of two and more of `count` GPUs, the best connected first. `switched` have NVLinks to NVSwitches; `numa` is
/// each one's NUMA node; `between` says how two are connected, whichever comes first.
pub fn groups(
    count: usize,
    switched: &[bool],
    numa: &[Option<u32>],
    between: impl Fn(usize, usize) -> Between,
) -> Vec<(Link, Members)> {
    let mut groups = BTreeSet::new();
    let mut add = |link, members: Members| {
        if members.len() > 1 {
            groups.insert((link, members));
        }
    };
    add(Link::NvLink, (0..count).filter(|at| switched[*at]).collect());
    let each = || (0..count).flat_map(|one| (one + 1..count).map(move |other| (one, other)));
    // Where some pairs have more links than others, such as two instead of one, they are a group of their own.
    let widths: BTreeSet<u32> =
        each().map(|(one, other)| between(one, other).nvlinks).filter(|n| *n > 0).collect();
    for width in widths {
        for clique in cliques(count, |one, other| between(one, other).nvlinks >= width) {
            add(Link::NvLink, clique);
        }
    }
    for clique in cliques(count, |one, other| between(one, other).one_switch) {
        add(Link::Pcie, clique);
    }
    for clique in cliques(count, |one, other| between(one, other).switches) {
        add(Link::Pcie, clique);
    }
    for node in numa.iter().flatten().collect::<BTreeSet<_>>() {
        add(Link::Numa, (0..count).filter(|at| numa[*at].as_ref() == Some(node)).collect());
    }
    groups.into_iter().collect()
}

/// All sets of which every two are connected and that are part of no larger one (Bron and Kerbosch). A node has few
/// GPUs: 16 have at most 243 such sets.
fn cliques(count: usize, connected: impl Fn(usize, usize) -> bool) -> Vec<Members> {
    fn grow(
        clique: &mut Members,
        candidates: Members,
        mut done: Members,
        connected: &dyn Fn(usize, usize) -> bool,
        found: &mut Vec<Members>,
    ) {
        if candidates.is_empty() && done.is_empty() {
            found.push(clique.clone());
            return;
        }
        for (at, one) in candidates.iter().enumerate() {
            let near =
                |others: &[usize]| others.iter().copied().filter(|other| connected(*one, *other)).collect();
            clique.push(*one);
            grow(clique, near(&candidates[at + 1..]), near(&done), connected, found);
            clique.pop();
            done.push(*one);
        }
    }
    let mut found = Vec::new();
    grow(&mut Vec::new(), (0..count).collect(), Vec::new(), &connected, &mut found);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_on_nvswitch_are_one_group_and_numa_nodes_two() {
        let numa: Vec<_> = (0..8).map(|at| Some(at / 4)).collect();
        let found = groups(8, &[true; 8], &numa, |_, _| Between::default());
        assert_eq!(
            found,
            [
                (Link::NvLink, (0..8).collect()),
                (Link::Numa, vec![0, 1, 2, 3]),
                (Link::Numa, vec![4, 5, 6, 7])
            ]
        );
    }

    /// Two squares of four that are connected in full, and each GPU with its twin: DGX-1.
    #[test]
    fn a_cube_mesh_is_two_squares_and_the_pairs_between_them() {
        let between = |one: usize, other: usize| Between {
            nvlinks: u32::from(one / 4 == other / 4 || one + 4 == other || other + 4 == one),
            ..Between::default()
        };
        let found = groups(8, &[false; 8], &[None; 8], between);
        assert!(
            found.contains(&(Link::NvLink, vec![0, 1, 2, 3]))
                && found.contains(&(Link::NvLink, vec![4, 5, 6, 7]))
        );
        assert_eq!(found.iter().filter(|(_, members)| members.len() == 2).count(), 4);
        assert_eq!(found.len(), 6);
    }

    #[test]
    fn a_pair_with_more_links_is_a_group_within_its_group() {
        let between = |one: usize, other: usize| Between {
            nvlinks: if one + other == 1 { 2 } else { 1 },
            ..Between::default()
        };
        let found = groups(3, &[false; 3], &[None; 3], between);
        assert_eq!(found, [(Link::NvLink, vec![0, 1]), (Link::NvLink, vec![0, 1, 2])]);
    }

    #[test]
    fn pcie_switches_are_groups_and_so_is_what_no_host_bridge_parts() {
        let between = |one: usize, other: usize| Between {
            one_switch: one / 2 == other / 2,
            switches: one / 4 == other / 4,
            nvlinks: 0,
        };
        let found: Vec<_> =
            groups(5, &[false; 5], &[None; 5], between).into_iter().map(|(_, it)| it).collect();
        assert_eq!(found, [vec![0, 1], vec![0, 1, 2, 3], vec![2, 3]]);
    }

    #[test]
    fn nothing_known_is_no_group() {
        assert!(groups(4, &[false; 4], &[None; 4], |_, _| Between::default()).is_empty());
        assert!(groups(0, &[], &[], |_, _| Between::default()).is_empty());
    }
}
