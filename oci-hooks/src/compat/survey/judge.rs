//! What is to be said of what was found: the findings, each with its reason and remedy.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{
    super::{
        Finding,
        cuda::{Covered, Driver, How, function},
        fatbin::Serves,
        start::machine,
    },
    Few, Linked, Survey,
};

/// Names that one finding shows.
const SHOWN: usize = 5;

/// A libcuda below this is a stub: real ones have 15 MiB and more, NVIDIA's stubs below 1 MiB.
pub(super) const STUB_BYTES: u64 = 4 << 20;

/// What an image is judged against.
#[derive(Clone, Copy, Debug)]
pub struct Against<'a> {
    /// The driver, where one is known.
    pub driver: Option<&'a Driver>,
    /// What the shim covers.
    pub covered: &'a Covered,
    /// The shim's machine (`e_machine`): files of another are passed by.
    pub machine: u16,
    /// The program that is started, without links: what keeps it from loading keeps the container from working,
    /// which is more than can be said of any other file.
    pub started: Option<&'a Path>,
    /// The GPUs, by compute capability without the dot (80 is 8.0), where they are known.
    pub gpus: &'a BTreeSet<u32>,
}
impl Survey {
    /// Says what it all means.
    pub fn judge(&self, against: Against<'_>) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Some(driver) = against.driver {
            self.judge_runtimes(driver, &mut findings);
            self.judge_missing(driver, against.started, &mut findings);
            self.judge_asked(driver, &mut findings);
        } else if self.has_cuda() {
            let users = self.users().chain(self.libcudas.kept.iter().map(|(path, _)| path.as_path()));
            findings.push(
                Finding::info(
                    "driver-unknown",
                    "no driver was found to compare with",
                    "whether its CUDA runtimes fit the driver is left open",
                    "name a driver's root with --driver",
                )
                .at(users.min().unwrap_or(Path::new("/"))),
            );
        }
        self.judge_several(&mut findings);
        self.judge_gpu_code(against.gpus, against.driver, &mut findings);
        self.judge_uncovered(against.covered, &mut findings);
        self.judge_copies(&mut findings);
        self.judge_out_of_reach(&mut findings);
        self.judge_broken(against.machine, &mut findings);
        findings
    }

    fn judge_runtimes(&self, driver: &Driver, findings: &mut Vec<Finding>) {
        let offered = driver.cuda;
        let too_new: Vec<_> =
            self.runtimes.kept.iter().filter(|(_, runtime)| runtime.cuda.major() > offered.major()).collect();
        let some_fit = too_new.len() < self.runtimes.kept.len();
        let mut majors: Vec<u32> = too_new.iter().map(|(_, runtime)| runtime.cuda.major()).collect();
        majors.sort_unstable();
        majors.dedup();
        for major in majors {
            let of_major = || too_new.iter().filter(|(_, runtime)| runtime.cuda.major() == major);
            let Some((path, runtime)) =
                of_major().min_by_key(|(path, runtime)| (runtime.how == How::Needs, path))
            else {
                continue;
            };
            let needed =
                runtime.cuda.oldest_driver().map_or("newer".into(), |branch| format!("{branch} or newer"));
            let what = format!(
                "the image {} a CUDA {major} runtime{}, the driver {} serves CUDA up to {offered}",
                if runtime.how == How::Needs { "needs" } else { "brings" },
                others(of_major().count() as u64),
                driver.version
            );
            let why = "cudaErrorInsufficientDriver is all that its programs get; a compatibility libcuda in the image is not used with a share";
            let remedy =
                format!("install driver {needed} on the node, or use an image for CUDA {}", offered.major());
            let finding = if some_fit {
                Finding::warn("cuda-runtime-too-new", what, why, remedy)
            } else {
                Finding::refuse("cuda-driver-too-old", what, why, remedy)
            };
            findings.push(finding.at(path));
        }
        let newest = self
            .runtimes
            .kept
            .iter()
            .filter(|(_, runtime)| runtime.cuda.major() == offered.major() && runtime.cuda > offered)
            .max_by(|a, b| a.1.cuda.cmp(&b.1.cuda).then(b.0.cmp(&a.0)));
        if let Some((path, runtime)) = newest {
            findings.push(
                Finding::warn(
                    "cuda-minor-newer",
                    format!(
                        "the image brings CUDA {}, the driver {} serves CUDA up to {offered}",
                        runtime.cuda, driver.version
                    ),
                    "it runs, but PTX that it compiles or brings is too new for the driver (CUDA_ERROR_UNSUPPORTED_PTX_VERSION), and newer functions are missing",
                    "nothing, if its GPU code is compiled for this node's GPUs; else install a newer driver",
                )
                .at(path),
            );
        }
    }

    fn judge_missing(&self, driver: &Driver, started: Option<&Path>, findings: &mut Vec<Finding>) {
        let mut missing: Vec<(&Linked, Vec<&str>)> = self
            .linked
            .kept
            .iter()
            .map(|linked| {
                let known = |name: &&str| function(name).is_some() || name.starts_with("nvml");
                let lacks = |name: &&str| !driver.exports.contains(*name);
                (linked, linked.imports.iter().map(String::as_str).filter(known).filter(lacks).collect())
            })
            .filter(|(_, names): &(_, Vec<_>)| !names.is_empty())
            .collect();
        missing.sort_by(|a, b| a.0.path.cmp(&b.0.path));
        for (linked, names) in missing.into_iter().take(SHOWN) {
            let what = format!(
                "it is linked to functions that driver {} does not have: {}",
                driver.version,
                shown(names.iter().map(ToString::to_string), names.len() as u64)
            );
            let remedy = "install a newer driver on the node, or use an image made for this one";
            let why = if linked.bind_now {
                "it binds all at once, so it does not load at all"
            } else {
                "a program dies when it first calls one of them"
            };
            let finding = if linked.bind_now && started == Some(&linked.path) {
                Finding::refuse("symbol-missing", what, why, remedy)
            } else {
                Finding::warn("symbol-missing", what, why, remedy)
            };
            findings.push(finding.at(&linked.path));
        }
    }

    /// Functions asked for by name: a program must live with an answer of none, and mostly does.
    fn judge_asked(&self, driver: &Driver, findings: &mut Vec<Finding>) {
        let missing: Vec<_> = self.asked.iter().filter(|(name, _)| !driver.answers(name)).collect();
        if let Some((_, path)) = missing.first() {
            let names = missing.iter().map(|(name, _)| (*name).clone());
            findings.push(
                Finding::info(
                    "symbol-asked",
                    format!(
                        "functions are asked for that driver {} does not have: {}",
                        driver.version,
                        shown(names, missing.len() as u64)
                    ),
                    "who asks by name is told that there are none, and has to do without",
                    "nothing, if its programs run on this driver without a share",
                )
                .at(path),
            );
        }
    }

    fn judge_several(&self, findings: &mut Vec<Finding>) {
        let brought = self.runtimes.kept.iter().filter(|(_, runtime)| runtime.how != How::Needs);
        let mut majors = BTreeMap::new();
        for (path, runtime) in brought {
            majors.entry(runtime.cuda.major()).or_insert(path);
        }
        if let Some((_, first)) = majors.first_key_value().filter(|_| majors.len() > 1) {
            let each = majors.iter().map(|(major, path)| format!("CUDA {major} ({})", path.display()));
            findings.push(
                Finding::info(
                    "cuda-runtimes-several",
                    format!(
                        "the image brings runtimes of several lines: {}",
                        shown(each, majors.len() as u64)
                    ),
                    "which one a program takes is its own choice, and each needs its own driver",
                    "nothing, if the driver serves the newest of them",
                )
                .at(first),
            );
        }
    }

    fn judge_gpu_code(&self, gpus: &BTreeSet<u32>, driver: Option<&Driver>, findings: &mut Vec<Finding>) {
        let capability = |gpu: u32| format!("{}.{}", gpu / 10, gpu % 10);
        if let (Some((path, _)), true) =
            (self.gpu_code.kept.iter().min_by_key(|(path, _)| path), gpus.is_empty())
        {
            findings.push(
                Finding::info(
                    "gpu-unknown",
                    format!("it has code for some GPUs{}, and no GPU is known to compare with", others(self.gpu_code.count)),
                    "whether its kernels run there is left open",
                    "name the GPUs with --gpu, or run it on a node whose vcuda-device-plugin has written its inventory",
                )
                .at(path),
            );
        }
        for gpu in gpus {
            let that = |serves: Serves| {
                let mut paths: Vec<_> =
                    self.gpu_code.kept.iter().filter(|(_, code)| code.serves(*gpu) == serves).collect();
                paths.sort_by(|a, b| a.0.cmp(&b.0));
                paths
            };
            let nothing = that(Serves::Nothing);
            if let Some((path, _)) = nothing.first() {
                findings.push(
                    Finding::warn(
                        "gpu-code-none",
                        format!(
                            "it has no code for GPUs of compute capability {}{}",
                            capability(*gpu),
                            others(nothing.len() as u64)
                        ),
                        "its kernels fail there (cudaErrorNoKernelImageForDevice)",
                        "use an image made for this GPU, or another node",
                    )
                    .at(path),
                );
            }
            let ptx = that(Serves::Ptx);
            let offered = driver.map(|driver| driver.cuda);
            let too_new: Vec<_> = ptx
                .iter()
                .filter(|(_, code)| offered.is_some_and(|offered| code.ptx_needs() > Some(offered)))
                .collect();
            if let Some((path, code)) = too_new.first() {
                findings.push(
                    Finding::warn(
                        "gpu-code-ptx-too-new",
                        format!(
                            "for compute capability {} it has PTX only, of CUDA {}{}; the driver serves CUDA up to {}",
                            capability(*gpu),
                            code.ptx_needs().unwrap_or_default(),
                            others(too_new.len() as u64),
                            offered.unwrap_or_default()
                        ),
                        "the driver cannot compile it, so its kernels fail (CUDA_ERROR_UNSUPPORTED_PTX_VERSION)",
                        "install a newer driver on the node, or use an image made for this GPU",
                    )
                    .at(path),
                );
            } else if let Some((path, _)) = ptx.first() {
                findings.push(
                    Finding::info(
                        "gpu-code-ptx",
                        format!("for compute capability {} it has PTX only{}", capability(*gpu), others(ptx.len() as u64)),
                        "the driver compiles it at first use, which takes seconds to minutes and is kept in ~/.nv",
                        "nothing, if a slow first start is no matter",
                    )
                    .at(path),
                );
            }
        }
    }

    fn judge_uncovered(&self, covered: &Covered, findings: &mut Vec<Finding>) {
        if covered.0.is_empty() {
            return;
        }
        let asked: Vec<_> = self.asked.iter().filter(|(name, _)| covered.misses(name)).collect();
        if let Some((_, path)) = asked.first() {
            let names = asked.iter().map(|(name, _)| (*name).clone());
            findings.push(
                Finding::warn(
                    "symbol-uncovered",
                    format!(
                        "functions are asked for by name that the shim passes through: {}",
                        shown(names, asked.len() as u64)
                    ),
                    "memory that they take or work that they launch is not counted",
                    "install a newer version of vcuda on the node",
                )
                .at(path),
            );
        }
        let mut uncovered: Vec<(&Linked, Vec<String>)> = self
            .linked
            .kept
            .iter()
            .map(|linked| {
                (
                    linked,
                    linked.imports.iter().filter(|name| covered.misses(name)).cloned().collect::<Vec<_>>(),
                )
            })
            .filter(|(_, names)| !names.is_empty())
            .collect();
        uncovered.sort_by(|a, b| a.0.path.cmp(&b.0.path));
        for (linked, names) in uncovered.into_iter().take(SHOWN) {
            let count = names.len() as u64;
            findings.push(
                Finding::warn(
                    "symbol-uncovered",
                    format!(
                        "it is linked to functions that the shim passes through: {}",
                        shown(names, count)
                    ),
                    "memory that they take or work that they launch is not counted",
                    "install a newer version of vcuda on the node",
                )
                .at(&linked.path),
            );
        }
    }

    fn judge_copies(&self, findings: &mut Vec<Finding>) {
        let mut copies: Vec<_> = self.libcudas.kept.iter().collect();
        copies.sort();
        for (path, size) in copies.into_iter().take(SHOWN) {
            let stub = *size < STUB_BYTES;
            findings.push(if stub {
                Finding::info(
                    "libcuda-stub",
                    "the image has a libcuda that is for linking only",
                    "the shim is loaded under the same name before it, so it is not taken by that name",
                    "remove its folder from LD_LIBRARY_PATH and RUNPATH, where it breaks CUDA without shares too",
                )
                .at(path)
            } else {
                Finding::warn(
                    "libcuda-own",
                    "the image brings its own libcuda",
                    "by name the shim is taken in its place; opened by this path and of another version than the node's driver it fails",
                    "remove the driver's libraries (cuda-compat, libcuda1) from the image; the node brings them",
                )
                .at(path)
            });
        }
        let mut copies: Vec<_> = self.nvmls.kept.iter().filter(|(_, size)| *size >= STUB_BYTES / 8).collect();
        copies.sort();
        for (path, _) in copies.into_iter().take(SHOWN) {
            findings.push(
                Finding::warn(
                    "nvml-own",
                    "the image brings its own libnvidia-ml",
                    "of another version than the node's driver it only says \"Driver/library version mismatch\"",
                    "remove it from the image; the node brings it",
                )
                .at(path),
            );
        }
    }

    fn judge_out_of_reach(&self, findings: &mut Vec<Finding>) {
        let mut direct: Vec<_> = self.direct.kept.iter().collect();
        direct.sort();
        for path in direct.into_iter().take(SHOWN) {
            findings.push(
                Finding::warn(
                    "driver-direct",
                    "it names the driver's control nodes",
                    "a program that talks to the kernel driver past libcuda is not held to its ceiling",
                    "do not run it in a container with a share, unless it only looks at the nodes",
                )
                .at(path),
            );
        }
        let mut namespaces: Vec<_> = self.namespaces.kept.iter().collect();
        namespaces.sort();
        for path in namespaces.into_iter().take(SHOWN) {
            findings.push(
                Finding::info(
                    "cuda-namespace",
                    "it opens libraries in a namespace of their own (dlmopen) and names libcuda",
                    "there a second copy of the shim is loaded, which shares the container's ceiling",
                    "nothing",
                )
                .at(path),
            );
        }
        let mut statics: Vec<&PathBuf> = self.statics.kept.iter().collect();
        statics.sort();
        if let Some(first) = statics.first() {
            let paths = statics.iter().map(|path| path.display().to_string());
            findings.push(
                Finding::info(
                    "programs-static",
                    format!("static programs: {}", shown(paths, self.statics.count)),
                    "the shim is not loaded into them; CUDA from within is only seen where they open libcuda.so.1",
                    "nothing, if they do not use CUDA",
                )
                .at(first),
            );
        }
    }

    fn judge_broken(&self, of: u16, findings: &mut Vec<Finding>) {
        let (broken, count) = (sorted(&self.broken), self.broken.count);
        if let Some((first, _)) = broken.first() {
            findings.push(
                Finding::info(
                    "elf-broken",
                    format!("not what they say they are: {}", shown(broken.iter().map(with_reason), count)),
                    "no loader takes them",
                    "nothing, if they are test data or debug symbols",
                )
                .at(first),
            );
        }
        let (unreadable, count) = (sorted(&self.unreadable), self.unreadable.count);
        if let Some((first, _)) = unreadable.first() {
            findings.push(
                Finding::warn(
                    "file-unreadable",
                    format!(
                        "could not be read while looking for what is for {}: {}",
                        machine(of, 64),
                        shown(unreadable.iter().map(with_reason), count)
                    ),
                    "what is in them is left open",
                    "run as root, and look at the disk",
                )
                .at(first),
            );
        }
    }
}

fn sorted(few: &Few<(PathBuf, String)>) -> Vec<&(PathBuf, String)> {
    let mut files: Vec<_> = few.kept.iter().collect();
    files.sort();
    files
}

fn with_reason((path, reason): &&(PathBuf, String)) -> String {
    format!("{} ({reason})", path.display())
}

fn others(count: u64) -> String {
    if count > 1 { format!(" (and in {} more files)", count - 1) } else { String::new() }
}

/// The first few of `names`, and how many more there are.
fn shown(names: impl IntoIterator<Item = String>, count: u64) -> String {
    let names: Vec<String> = names.into_iter().take(SHOWN).collect();
    let more = count.saturating_sub(names.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names.join(", "))
}
