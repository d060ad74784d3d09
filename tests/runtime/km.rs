//! The `km` backend against a stand-in for the vendor's module; needs root and FUSE.

// clippy.toml allows it in tests; clippy does not count the helpers of a test as such.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Barrier, Once};

use crate::km_standin::{Fault, StandIn};
use cgpu::backend::km::{Km, KmError};
use cgpu::backend::{BackendError, Instance, Isolation, Observed, Tenant};
use cgpu_core::plan::{Change, Kind, Plan, PlannedGpu};

const A: &str = "12b2edccd7aa";
const B: &str = "3f2a00000000";
const GIB: u64 = 1 << 30;

/// A plan with these GPUs and quotas.
fn plan(gpus: &[(u32, Option<u64>)]) -> Plan {
    let gpu = |&(index, memory_limit_bytes): &(u32, Option<u64>)| PlannedGpu {
        index,
        uuid: format!("GPU-00000000-0000-0000-0000-00000000000{index}"),
        minor: index,
        memory_total_bytes: 16 * GIB,
        memory_reserved_bytes: 0,
        memory_limit_bytes,
        mig: None,
    };
    let gpus = gpus.iter().map(gpu).collect();
    Plan {
        backend: Kind::Km,
        gpus,
        weight: 1,
        high_priority: false,
        caveats: cgpu_core::plan::Caveats::default(),
    }
}

fn weighted(weight: u32, gpus: &[(u32, Option<u64>)]) -> Plan {
    Plan { weight, ..plan(gpus) }
}

fn tenant<'a>(short_id: &'a str, plan: &'a Plan) -> Tenant<'a> {
    Tenant { id: short_id, short_id, plan }
}

fn km(standin: &StandIn) -> Km {
    record_logs();
    Km::new(standin.path().to_owned())
}

/// Activates, and is sure of it.
fn activated(standin: &StandIn, short_id: &str, plan: &Plan) {
    km(standin).activate(tenant(short_id, plan)).unwrap();
}

/// Activates what can't be, and returns why.
fn refused(standin: &StandIn, short_id: &str, plan: &Plan) -> KmError {
    km_error(km(standin).activate(tenant(short_id, plan)))
}

fn km_error<T: std::fmt::Debug>(result: Result<T, BackendError>) -> KmError {
    match result {
        Err(BackendError::Km(error)) => error,
        other => panic!("expected an error of the module, found {other:?}"),
    }
}

/// The writes to the tree, as `path=bytes`.
fn writes(standin: &StandIn) -> Vec<String> {
    standin.writes().into_iter().map(|(path, bytes)| format!("{path}={bytes}")).collect()
}

/// What is logged on this thread meanwhile.
fn logged(act: impl FnOnce()) -> String {
    record_logs();
    LOG.take();
    act();
    String::from_utf8(LOG.take()).unwrap()
}

thread_local! {
    static LOG: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Lets each thread have its own log, from one subscriber for all of them: if only
/// some threads have one, `tracing` may remember of a log line that no subscriber wants it.
fn record_logs() {
    struct Log;
    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            LOG.with_borrow_mut(|log| log.extend_from_slice(bytes));
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log).init());
}

// The stand-in itself.

#[test]
fn stand_in_takes_control_words_like_the_module() {
    let standin = StandIn::mount(&[0, 1]);
    let errno = |word: &[u8]| {
        let mut control =
            fs::OpenOptions::new().write(true).open(standin.path().join("inst_ctl")).unwrap();
        control.write(word).err().and_then(|error| error.raw_os_error())
    };
    let einval = Some(nix::errno::Errno::EINVAL as i32);
    let enospc = Some(nix::errno::Errno::ENOSPC as i32);
    assert_eq!(errno(b"012b2edccd7aa"), None);
    assert_eq!(errno(b"012b2edccd7aa\n"), einval);
    assert_eq!(errno(b"012b2edccd7a"), einval);
    assert_eq!(errno(b"212b2edccd7aa"), einval);
    assert_eq!(errno(b"x12b2edccd7aa"), einval);
    standin.set_gpu(0, "max_inst", 1);
    assert_eq!(errno(b"03f2a00000000"), enospc);
    assert_eq!(errno(b"-3f2a00000000"), None);
    assert_eq!(standin.instances(0), [A]);
    assert_eq!(errno(b"-12b2edccd7aa"), None);
    assert_eq!(standin.instances(0), [""; 0]);
}

#[test]
fn other_processes_see_the_stand_in_at_once() {
    let standin = StandIn::mount(&[0]);
    let script = "cd $0 && printf %s 0$1 > inst_ctl && cat 0/$1/memsize 0/$1/id version major \
                  0/free_weight && printf %s 77 > 0/$1/memsize && cat 0/$1/meminfo && \
                  printf %s -$1 > inst_ctl && ! test -e 0/$1 && ls 0 && stat -c %a inst_ctl";
    let output =
        Command::new("sh").args(["-c", script]).arg(standin.path()).arg(A).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "1073741824\n12b2edccd7aa\n1.5.8\n508\n19\nFree: 77\n\
         free_weight\nmax_inst\npolicy\nprio_ratio\n222\n"
    );
}

#[test]
fn stand_in_is_removed_when_its_test_panics() {
    let path = std::panic::catch_unwind(|| {
        let standin = StandIn::mount(&[0]);
        std::panic::panic_any(standin.path().to_owned());
    })
    .unwrap_err()
    .downcast::<std::path::PathBuf>()
    .unwrap();
    assert!(!path.exists(), "{} is left", path.display());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
}

#[test]
fn stand_in_unmounts_while_its_file_is_open() {
    let standin = StandIn::mount(&[0]);
    let path = standin.path().to_owned();
    let open = fs::File::open(path.join("version")).unwrap();
    drop(standin);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
    drop(open);
}

// Whether it can be used.

#[test]
fn missing_module_error_names_what_to_load() {
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("cgpu_km");
    let sentence = |missing: &Path| {
        format!(
            "the vendor's module is not loaded: {} does not exist; load it by `modprobe \
             cgpu_procfs` and `modprobe cgpu_km`, or configure another backend",
            missing.display()
        )
    };
    let km = Km::new(tree.clone());
    assert_eq!(km.usable().unwrap_err().to_string(), sentence(&tree));
    fs::create_dir(&tree).unwrap();
    let control = tree.join("inst_ctl");
    assert_eq!(km.usable().unwrap_err().to_string(), sentence(&control));
    let plan = plan(&[(0, Some(GIB))]);
    assert_eq!(km.activate(tenant(A, &plan)).unwrap_err().to_string(), sentence(&control));
    assert_eq!(km.list(None).unwrap_err().to_string(), sentence(&control));
    let change = Change::Weight(1);
    assert_eq!(km.set(tenant(A, &plan), change).unwrap_err().to_string(), sentence(&control));
    fs::write(&control, "").unwrap();
    km.usable().unwrap();
}

// Activation.

#[test]
fn activates_by_one_control_word_and_the_quota() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, A, &plan(&[(0, Some(4301 << 20))]));
    assert_eq!(writes(&standin), ["inst_ctl=012b2edccd7aa", "0/12b2edccd7aa/memsize=4509925376"]);
    assert_eq!(standin.gpu(0, "policy"), 1);
}

/// A container's part of a GPU of which it uses nothing.
fn unused(gpu_index: u32, memory_limit_bytes: u64) -> Instance {
    Instance {
        gpu_index,
        memory_limit_bytes,
        memory_used_bytes: Some(0),
        processes: Vec::new(),
        compute_held: None,
        share_refused: None,
    }
}

/// A container with these parts and no process.
fn observed(short_id: &str, instances: &[Instance]) -> Observed {
    Observed {
        short_id: short_id.to_owned(),
        instances: Some(instances.to_vec()),
        calls: None,
        durations: None,
        monitor_updates: None,
        process_count: Some(0),
        leaked_to: Vec::new(),
    }
}

/// The one part of a GPU of the one container that there is.
fn only_instance(standin: &StandIn) -> Instance {
    let observed = km(standin).list(None).unwrap();
    let [Observed { instances: Some(instances), .. }] = &observed[..] else {
        panic!("one container: {observed:?}")
    };
    let [instance] = &instances[..] else { panic!("one GPU: {observed:?}") };
    instance.clone()
}

#[test]
fn two_gpus_get_different_quotas_in_container_order() {
    let standin = StandIn::mount(&[0, 1, 2]);
    activated(&standin, A, &plan(&[(2, Some(3 * GIB)), (0, Some(GIB))]));
    assert_eq!(
        writes(&standin),
        [
            "inst_ctl=212b2edccd7aa",
            "2/12b2edccd7aa/memsize=3221225472",
            "inst_ctl=012b2edccd7aa",
            "0/12b2edccd7aa/memsize=1073741824",
        ]
    );
    assert_eq!(standin.instances(1), [""; 0]);
    let instances = [unused(0, GIB), unused(2, 3 * GIB)];
    assert_eq!(km(&standin).list(None).unwrap(), [observed(A, &instances)]);
}

#[test]
fn leaves_whole_gpus_alone() {
    let standin = StandIn::mount(&[0, 2]);
    activated(&standin, A, &plan(&[(0, None), (2, Some(GIB)), (9, None)]));
    assert_eq!(standin.instances(0), [""; 0]);
    assert_eq!(standin.instances(2), [A]);
    let before = writes(&standin);
    activated(&standin, B, &plan(&[(0, None)]));
    assert_eq!(writes(&standin), before);
}

#[test]
fn activates_where_id_is_an_instance_number() {
    let standin = StandIn::mount(&[0]);
    standin.set_version("0.8.8");
    activated(&standin, A, &plan(&[(0, Some(GIB))]));
    assert_eq!(fs::read_to_string(standin.path().join("0").join(A).join("id")).unwrap(), "1\n");
}

#[test]
fn sets_high_priority_only_where_asked() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, A, &Plan { high_priority: true, ..plan(&[(0, Some(GIB))]) });
    activated(&standin, B, &plan(&[(0, Some(GIB))]));
    assert_eq!(standin.instance(0, A, "highprio"), 1);
    assert_eq!(standin.instance(0, B, "highprio"), 0);
    assert!(!writes(&standin).iter().any(|write| write.starts_with("0/3f2a00000000/highprio")));
}

#[test]
fn activates_eight_tenants_at_once() {
    let standin = StandIn::mount(&[0, 1]);
    let barrier = Barrier::new(8);
    let name = |n: u64| format!("{n:012}");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (standin, barrier) = (&standin, &barrier);
            scope.spawn(move || {
                let plan = plan(&[(0, Some((n + 1) * GIB)), (1, Some(GIB))]);
                let short_id = name(n);
                barrier.wait();
                activated(standin, &short_id, &plan);
            });
        }
    });
    let names: Vec<String> = (0..8).map(name).collect();
    assert_eq!(standin.instances(0), names);
    assert_eq!(standin.instances(1), names);
    for n in 0..8 {
        assert_eq!(standin.instance(0, &name(n), "memsize"), (n + 1) * GIB);
        assert_eq!(standin.instance(1, &name(n), "memsize"), GIB);
    }
}

/// Of eight tenants at once, as many are admitted as the module has slots.
#[test]
fn concurrent_tenants_are_admitted_up_to_slot_count() {
    let standin = StandIn::mount(&[0]);
    standin.set_gpu(0, "max_inst", 3);
    let barrier = Barrier::new(8);
    let errors: Vec<KmError> = std::thread::scope(|scope| {
        let attempts: Vec<_> = (0..8)
            .map(|n| {
                let (standin, barrier) = (&standin, &barrier);
                scope.spawn(move || {
                    let plan = plan(&[(0, Some(GIB))]);
                    barrier.wait();
                    match km(standin).activate(tenant(&format!("{n:012}"), &plan)) {
                        Err(BackendError::Km(error)) => Some(error),
                        other => other.map(|()| None).unwrap(),
                    }
                })
            })
            .collect();
        attempts.into_iter().filter_map(|attempt| attempt.join().unwrap()).collect()
    });
    assert_eq!(standin.instances(0).len(), 3);
    assert_eq!(errors.len(), 5);
    for error in errors {
        assert!(matches!(error, KmError::NoSlot { .. } | KmError::NoWeight { .. }), "{error}");
    }
}

// What is refused before anything is made.

#[test]
fn gpu_beyond_control_digit_is_refused_before_changes() {
    let standin = StandIn::mount(&[0, 9]);
    let error = refused(&standin, A, &plan(&[(0, Some(GIB)), (9, Some(GIB))]));
    assert_eq!(
        error.to_string(),
        "GPU 9 is beyond the module, whose control node takes GPUs 0 to 7; give the container \
         another GPU, or configure another backend"
    );
    assert_eq!(writes(&standin), [""; 0]);
}

/// A GPU that the module does not know is refused, and the error names those that it knows.
#[test]
fn unknown_gpu_is_refused_naming_the_known_ones() {
    let standin = StandIn::mount(&[0, 1]);
    let error = refused(&standin, A, &plan(&[(0, Some(GIB)), (3, Some(GIB))]));
    assert_eq!(
        error.to_string(),
        "GPU 3 is unknown to the module, which has GPUs 0, 1; give the container another GPU, \
         or load the module anew"
    );
    assert_eq!(writes(&standin), [""; 0]);
}

#[test]
fn refuses_a_quota_of_nothing() {
    let standin = StandIn::mount(&[0]);
    let error = refused(&standin, A, &plan(&[(0, Some(0))]));
    assert_eq!(error.to_string(), "the quota on GPU 0 is 0 bytes; ask for 1 MiB at least");
    assert_eq!(writes(&standin), [""; 0]);
}

#[test]
fn short_id_invalid_as_instance_name_is_refused() {
    let standin = StandIn::mount(&[0]);
    let plan = plan(&[(0, Some(GIB))]);
    for short_id in ["", "demo", "12b2edccd7aab", "../../../etc", "12b2edccd7a\n", "äääääääääääa"]
    {
        let sentence = format!(
            "{short_id:?} can't name an instance of the module; it takes 12 printable ASCII \
             characters without a slash"
        );
        assert_eq!(refused(&standin, short_id, &plan).to_string(), sentence);
        let km = km(&standin);
        assert_eq!(km.deactivate(short_id).unwrap_err().to_string(), sentence);
        let set = km.set(tenant(short_id, &plan), Change::Weight(1));
        assert_eq!(set.unwrap_err().to_string(), sentence);
    }
    assert_eq!(writes(&standin), [""; 0]);
}

#[test]
fn refuses_weight_above_free_and_names_free_weight() {
    let standin = StandIn::mount(&[0, 1]);
    standin.set_gpu(1, "max_inst", 4);
    standin.plant(1, B);
    let error = refused(&standin, A, &weighted(4, &[(0, Some(GIB)), (1, Some(GIB))]));
    assert_eq!(
        error.to_string(),
        "GPU 1 has a weight of 3 left, held by 3f2a00000000; this container asks for 4: lower \
         ALIYUN_COM_GPU_SCHD_WEIGHT, or stop one of them"
    );
    assert_eq!(writes(&standin), [""; 0]);
    activated(&standin, A, &weighted(3, &[(1, Some(GIB))]));
    assert_eq!(standin.instance(1, A, "weight"), 3);
}

// Leftovers.

#[test]
fn stale_instance_is_replaced_and_logged() {
    let standin = StandIn::mount(&[0, 1]);
    standin.set_gpu(0, "max_inst", 4);
    for gpu in [0, 1] {
        standin.plant(gpu, A);
        standin.set_instance(gpu, A, "weight", 4);
        standin.set_instance(gpu, A, "highprio", 1);
    }
    standin.plant(1, B);
    let log = logged(|| activated(&standin, A, &plan(&[(0, Some(GIB))])));
    assert!(
        log.contains(
            "INFO cgpu::backend::km: the module still holds an instance of this name, which \
             belongs to no registered container; it is destroyed container=\"12b2edccd7aa\" \
             gpus=[0, 1]"
        ),
        "{log}"
    );
    assert_eq!(standin.instance(0, A, "weight"), 1);
    assert_eq!(standin.instance(0, A, "highprio"), 0);
    assert_eq!(standin.instances(1), [B]);
}

#[test]
fn refuses_where_a_leftover_can_not_be_removed() {
    let standin = StandIn::mount(&[0, 1]);
    standin.plant(1, A);
    standin.fail(Fault::DestroysNothing);
    let error = refused(&standin, A, &plan(&[(0, Some(GIB))]));
    assert_eq!(
        error.to_string(),
        "the module reported success, but instance 12b2edccd7aa is still on GPU 1; \
         see the kernel log"
    );
    assert_eq!(writes(&standin), ["inst_ctl=-12b2edccd7aa"]);
}

// Policies.

#[test]
fn weight_selects_policy_2_if_alone_on_gpu() {
    let standin = StandIn::mount(&[0]);
    let log = logged(|| activated(&standin, A, &weighted(4, &[(0, Some(GIB))])));
    assert_eq!(standin.gpu(0, "policy"), 2);
    assert_eq!(standin.instance(0, A, "weight"), 4);
    assert_eq!(standin.gpu(0, "max_inst") - 4, 16);
    assert!(
        log.contains(
            "INFO cgpu::backend::km: a weight above 1 selects policy 2 for the whole GPU \
             container=\"12b2edccd7aa\" gpu=0 weight=4 before=1"
        ),
        "{log}"
    );
}

/// A weight changes no policy that other containers rely on, and the log says that it has no
/// effect.
#[test]
fn ineffective_weight_leaves_policy_and_is_logged() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, B, &plan(&[(0, Some(GIB))]));
    let log = logged(|| activated(&standin, A, &weighted(4, &[(0, Some(GIB))])));
    assert_eq!(standin.gpu(0, "policy"), 1);
    assert_eq!(standin.instance(0, A, "weight"), 4);
    assert!(
        log.contains(
            "WARN cgpu::backend::km: weight 4 of 12b2edccd7aa has no effect on GPU 0: its policy \
             is 1, not 2, and stays so while 3f2a00000000 is there"
        ),
        "{log}"
    );
}

#[test]
fn weight_under_policy_3_is_reported_as_ceiling() {
    let standin = StandIn::mount(&[0]);
    standin.set_gpu(0, "policy", 3);
    standin.plant(0, B);
    let log = logged(|| activated(&standin, A, &weighted(4, &[(0, Some(GIB))])));
    assert!(log.contains("weight 4 of 12b2edccd7aa is a fixed ceiling on GPU 0"), "{log}");
    assert_eq!(standin.gpu(0, "policy"), 3);
}

#[test]
fn second_weight_under_policy_2_logs_nothing() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, B, &weighted(2, &[(0, Some(GIB))]));
    let log = logged(|| activated(&standin, A, &weighted(4, &[(0, Some(GIB))])));
    assert_eq!(log, "");
    assert_eq!(writes(&standin).iter().filter(|write| write.starts_with("0/policy")).count(), 1);
}

#[test]
fn a_weight_of_1_leaves_the_policy() {
    let standin = StandIn::mount(&[0]);
    standin.set_gpu(0, "policy", 5);
    activated(&standin, A, &plan(&[(0, Some(GIB))]));
    assert_eq!(standin.gpu(0, "policy"), 5);
}

// Undo: the fault is on GPU 1, when GPU 0 has been made already.

fn two_gpus() -> Plan {
    Plan { high_priority: true, ..weighted(4, &[(0, Some(2 * GIB)), (1, Some(3 * GIB))]) }
}

/// Activates into `fault`, and asserts that nothing but `others` is there afterwards.
fn refused_without_traces(standin: &StandIn, fault: Fault, others: &[&str]) -> KmError {
    standin.fail(fault);
    let error = refused(standin, A, &two_gpus());
    for gpu in [0, 1] {
        assert_eq!(standin.instances(gpu), others);
        assert_eq!(standin.gpu(gpu, "policy"), 1);
    }
    standin.heal();
    activated(standin, A, &two_gpus());
    error
}

/// If a value did not take, the activation is undone, and the error says which value.
#[test]
fn activation_is_undone_if_a_value_is_ignored() {
    let faults = [
        ("memsize", "memsize of GPU 1 is 1073741824, not 3221225472"),
        ("weight", "weight of GPU 1 is 1, not 4"),
        ("highprio", "highprio of GPU 1 is 0, not 1"),
        ("policy", "policy of GPU 1 is 1, not 2"),
    ];
    for (name, sentence) in faults {
        let standin = StandIn::mount(&[0, 1]);
        let fault = Fault::IgnoresWrite { gpu: 1, name };
        let error = refused_without_traces(&standin, fault, &[]);
        let sentence = format!("the module reported success, but {sentence}; see the kernel log");
        assert_eq!(error.to_string(), sentence);
    }
}

/// If there is no free slot, the activation is undone, and the error names the holders.
#[test]
fn activation_is_undone_if_no_slot_is_free() {
    let standin = StandIn::mount(&[0, 1]);
    for gpu in [0, 1] {
        standin.plant(gpu, B);
        standin.plant(gpu, "000000000007");
    }
    let fault = Fault::NoSlot { gpu: 1 };
    let error = refused_without_traces(&standin, fault, &["000000000007", B]);
    assert_eq!(
        error.to_string(),
        "GPU 1 has no free slot (max_inst 20), held by 000000000007, 3f2a00000000; \
         stop one of them, or take another GPU"
    );
    assert_eq!(error.errno(), Some(nix::errno::Errno::ENOSPC as i32));
}

#[test]
fn undoes_where_a_create_made_nothing() {
    let standin = StandIn::mount(&[0, 1]);
    let error = refused_without_traces(&standin, Fault::MakesNothing { gpu: 1 }, &[]);
    assert_eq!(
        error.to_string(),
        "the module reported success, but made no instance 12b2edccd7aa on GPU 1; \
         see the kernel log"
    );
}

/// If a file cannot be read, the activation is undone, and the error retains the errno.
#[test]
fn activation_is_undone_if_a_file_is_unreadable() {
    for name in ["id", "memsize", "weight", "highprio"] {
        let standin = StandIn::mount(&[0, 1]);
        let path = format!("1/{A}/{name}");
        let fault = Fault::ReadFails { path: path.clone() };
        let error = refused_without_traces(&standin, fault, &[]);
        let path = standin.path().join(path);
        let sentence = format!("can't read {} of the vendor's module", path.display());
        assert_eq!(error.to_string(), sentence);
        assert_eq!(error.errno(), Some(nix::errno::Errno::EIO as i32));
        assert_eq!(error.source().unwrap().to_string(), "Input/output error (os error 5)");
    }
}

#[test]
fn undoes_where_a_file_holds_no_number() {
    let standin = StandIn::mount(&[0, 1]);
    let path = format!("1/{A}/memsize");
    let fault = Fault::Reads { path: path.clone(), text: "3 GiB\n".to_owned() };
    let error = refused_without_traces(&standin, fault, &[]);
    assert_eq!(
        error.to_string(),
        format!(
            "{} reads \"3 GiB\" where a number was expected; see whether cgpu knows this \
             version of the module",
            standin.path().join(path).display()
        )
    );
}

#[test]
fn undoes_where_a_file_never_ends() {
    let standin = StandIn::mount(&[0, 1]);
    let path = format!("1/{A}/weight");
    let fault = Fault::Reads { path: path.clone(), text: "1".repeat((64 << 10) + 1) };
    let error = refused_without_traces(&standin, fault, &[]);
    assert_eq!(
        error.to_string(),
        format!(
            "{} is longer than 65536 bytes; this is not the module's",
            standin.path().join(path).display()
        )
    );
}

#[test]
fn says_that_a_control_word_was_not_understood() {
    // A tree of a later version, that has the GPU's directory but not the word.
    let standin = StandIn::mount(&[0]);
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir(tree.path().join("1")).unwrap();
    fs::write(tree.path().join("1/free_weight"), "20").unwrap();
    std::os::unix::fs::symlink(standin.path().join("inst_ctl"), tree.path().join("inst_ctl"))
        .unwrap();
    let km = Km::new(tree.path().to_owned());
    let error = km_error(km.activate(tenant(A, &plan(&[(1, Some(GIB))]))));
    assert_eq!(
        error.to_string(),
        "the module refuses to make instance 12b2edccd7aa on GPU 1 as invalid; see the kernel \
         log, and whether cgpu knows this version of the module"
    );
    assert_eq!(error.errno(), Some(nix::errno::Errno::EINVAL as i32));
}

/// A failed activation leaves a policy that a container that came since may rely on.
#[test]
fn failed_activation_leaves_policy_newcomers_rely_on() {
    let standin = StandIn::mount(&[0, 1]);
    standin.fail(Fault::IgnoresWrite { gpu: 1, name: "policy" });
    let path = "1/policy".to_owned();
    standin.fail(Fault::Arrives { path, gpu: 0, short_id: B.to_owned() });
    let error = refused(&standin, A, &two_gpus());
    assert!(matches!(error, KmError::NotTaken { gpu: 1, name: "policy", .. }), "{error}");
    assert_eq!(standin.instances(0), [B]);
    assert_eq!(standin.gpu(0, "policy"), 2);
}

#[test]
fn keeps_the_first_error_where_undoing_fails_too() {
    let standin = StandIn::mount(&[0, 1]);
    standin.fail(Fault::ReadFails { path: format!("1/{A}/memsize") });
    standin.fail(Fault::DestroyFails);
    let error = refused(&standin, A, &two_gpus());
    assert_eq!(
        error.to_string(),
        format!(
            "can't read {}/1/12b2edccd7aa/memsize of the vendor's module; and it could not be \
             undone: can't write \"-12b2edccd7aa\" to {}/inst_ctl of the vendor's module \
             (Input/output error (os error 5))",
            standin.path().display(),
            standin.path().display()
        )
    );
    assert_eq!(error.errno(), Some(nix::errno::Errno::EIO as i32));
    let KmError::NotUndone(both) = error else { panic!("{error:?}") };
    assert!(matches!(both.first, KmError::Read { .. }));
    assert!(matches!(both.failures.as_slice(), [KmError::Write { .. }]));
}

#[test]
fn says_where_an_undo_left_something() {
    let standin = StandIn::mount(&[0, 1]);
    standin.fail(Fault::IgnoresWrite { gpu: 1, name: "policy" });
    standin.fail(Fault::DestroysNothing);
    assert_eq!(
        refused(&standin, A, &two_gpus()).to_string(),
        "the module reported success, but policy of GPU 1 is 1, not 2; see the kernel log; and \
         it could not be undone: the module reported success, but instance 12b2edccd7aa is \
         still on GPUs 0, 1; see the kernel log"
    );
    // Not the instances, but the policy of GPU 0 could be put back.
    assert_eq!(standin.gpu(0, "policy"), 1);
}

// Deactivation.

#[test]
fn deactivates_twice() {
    let standin = StandIn::mount(&[0, 1]);
    activated(&standin, A, &two_gpus());
    activated(&standin, B, &plan(&[(0, Some(GIB))]));
    km(&standin).deactivate(A).unwrap();
    assert_eq!(standin.instances(0), [B]);
    assert_eq!(standin.instances(1), [""; 0]);
    km(&standin).deactivate(A).unwrap();
    km(&standin).deactivate("000000000000").unwrap();
    assert!(writes(&standin).contains(&"inst_ctl=-12b2edccd7aa".to_owned()));
}

/// Nothing is left to deactivate if the module was unloaded.
#[test]
fn deactivation_succeeds_if_module_was_unloaded() {
    Km::new("/proc/no-such-tree".into()).deactivate(A).unwrap();
}

#[test]
fn says_where_a_deactivation_left_something() {
    let standin = StandIn::mount(&[0, 1]);
    activated(&standin, A, &two_gpus());
    standin.fail(Fault::DestroysNothing);
    assert_eq!(
        km(&standin).deactivate(A).unwrap_err().to_string(),
        "the module reported success, but instance 12b2edccd7aa is still on GPUs 0, 1; \
         see the kernel log"
    );
    standin.heal();
    standin.fail(Fault::DestroyFails);
    let error = km_error(km(&standin).deactivate(A));
    assert!(matches!(error, KmError::Write { .. }), "{error}");
    assert_eq!(error.errno(), Some(nix::errno::Errno::EIO as i32));
    // The unknown is still a success.
    km(&standin).deactivate(B).unwrap();
}

// Listing.

#[test]
fn lists_what_processes_hold() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, A, &plan(&[(0, Some(4 * GIB))]));
    standin.use_memory(0, A, 100, GIB);
    standin.use_memory(0, A, 101, GIB / 2);
    let instance = only_instance(&standin);
    assert_eq!(instance.memory_used_bytes, Some(GIB + GIB / 2));
    assert_eq!(instance.memory_limit_bytes, 4 * GIB);
}

/// If no process is listed, what is not free is listed as used.
#[test]
fn usage_without_processes_is_quota_minus_free() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, A, &plan(&[(0, Some(4 * GIB))]));
    let path = format!("0/{A}/meminfo");
    standin.fail(Fault::Reads { path, text: format!("Free: {GIB}") });
    assert_eq!(only_instance(&standin).memory_used_bytes, Some(3 * GIB));
}

#[test]
fn unparsable_usage_is_listed_as_unknown() {
    let standin = StandIn::mount(&[0]);
    activated(&standin, A, &plan(&[(0, Some(GIB))]));
    for text in ["", "Free: lots\n", &"PID: 1 Mem: 1\n".repeat(8192)] {
        standin.heal();
        let path = format!("0/{A}/meminfo");
        standin.fail(Fault::Reads { path, text: text.to_owned() });
        assert_eq!(only_instance(&standin).memory_used_bytes, None);
    }
}

#[test]
fn lists_only_instances_of_gpus() {
    let tree = tempfile::tempdir().unwrap();
    fs::write(tree.path().join("inst_ctl"), "").unwrap();
    let names =
        ["0/12b2edccd7aa", "0/short", "0/12b2edccd7aab", "01/12b2edccd7aa", "x/000000000000"];
    for name in names {
        let directory = tree.path().join(name);
        fs::create_dir_all(&directory).unwrap();
        // No newline, and blanks around: neither matters.
        fs::write(directory.join("memsize"), " 1048576 ").unwrap();
        fs::write(directory.join("meminfo"), "Free: 1048576").unwrap();
    }
    fs::write(tree.path().join("0/default_size"), "1").unwrap();
    let listed = Km::new(tree.path().to_owned()).list(None).unwrap();
    assert_eq!(listed, [observed(A, &[unused(0, 1 << 20)])]);
}

#[test]
fn listing_fails_if_a_quota_is_unreadable() {
    let standin = StandIn::mount(&[0]);
    standin.plant(0, A);
    standin.fail(Fault::ReadFails { path: format!("0/{A}/memsize") });
    let error = km_error(km(&standin).list(None));
    assert_eq!(
        error.to_string(),
        format!("can't read {}/0/{A}/memsize of the vendor's module", standin.path().display())
    );
}

// Changes.

#[test]
fn changes_the_quota_of_one_gpu() {
    let standin = StandIn::mount(&[0, 1]);
    let plan = plan(&[(0, Some(GIB)), (1, Some(GIB))]);
    activated(&standin, A, &plan);
    let change = Change::MemoryLimit { gpu_index: 1, bytes: 2 * GIB };
    km(&standin).set(tenant(A, &plan), change).unwrap();
    assert_eq!(standin.instance(0, A, "memsize"), GIB);
    assert_eq!(standin.instance(1, A, "memsize"), 2 * GIB);
}

#[test]
fn refuses_a_quota_below_what_is_in_use() {
    let standin = StandIn::mount(&[0]);
    let plan = plan(&[(0, Some(4 * GIB))]);
    activated(&standin, A, &plan);
    standin.use_memory(0, A, 100, 3 * GIB + 1);
    let set =
        |bytes| km(&standin).set(tenant(A, &plan), Change::MemoryLimit { gpu_index: 0, bytes });
    assert_eq!(
        set(3 * GIB).unwrap_err().to_string(),
        "12b2edccd7aa uses 3073 MiB of GPU 0, more than the 3072 MiB it is to have; \
         free memory in the container first"
    );
    assert_eq!(standin.instance(0, A, "memsize"), 4 * GIB);
    set(3 * GIB + 1).unwrap();
    // More is never refused, even where use is above the quota.
    standin.use_memory(0, A, 101, 9 * GIB);
    set(5 * GIB).unwrap();
    assert_eq!(
        set(0).unwrap_err().to_string(),
        "the quota on GPU 0 is 0 bytes; ask for 1 MiB at least"
    );
}

/// Weight and priority change on all GPUs under a quota.
#[test]
fn weight_and_priority_change_on_all_quota_gpus() {
    let standin = StandIn::mount(&[0, 1, 2]);
    let plan = plan(&[(0, Some(GIB)), (1, Some(GIB)), (2, None)]);
    activated(&standin, A, &plan);
    let log = logged(|| {
        km(&standin).set(tenant(A, &plan), Change::Weight(5)).unwrap();
        km(&standin).set(tenant(A, &plan), Change::HighPriority(true)).unwrap();
    });
    for gpu in [0, 1] {
        assert_eq!(standin.instance(gpu, A, "weight"), 5);
        assert_eq!(standin.instance(gpu, A, "highprio"), 1);
        assert_eq!(standin.gpu(gpu, "policy"), 2);
    }
    assert_eq!(log.matches("selects policy 2").count(), 2, "{log}");
    km(&standin).set(tenant(A, &plan), Change::HighPriority(false)).unwrap();
    assert_eq!(standin.instance(0, A, "highprio"), 0);
}

/// A new weight is checked against what is free together with what the container has.
#[test]
fn new_weight_may_reuse_the_containers_own_weight() {
    let standin = StandIn::mount(&[0]);
    standin.set_gpu(0, "max_inst", 5);
    standin.plant(0, B);
    let plan = weighted(2, &[(0, Some(GIB))]);
    activated(&standin, A, &plan);
    let set = |weight| km(&standin).set(tenant(A, &plan), Change::Weight(weight));
    assert_eq!(
        set(5).unwrap_err().to_string(),
        "GPU 0 has a weight of 4 left, held by 12b2edccd7aa, 3f2a00000000; this container asks \
         for 5: lower ALIYUN_COM_GPU_SCHD_WEIGHT, or stop one of them"
    );
    set(4).unwrap();
    assert_eq!(standin.instance(0, A, "weight"), 4);
}

/// A change that did not take on one GPU is undone on the other.
#[test]
fn change_ignored_on_one_gpu_is_undone_elsewhere() {
    let changes = [
        ("weight", Change::Weight(3)),
        ("policy", Change::Weight(3)),
        ("highprio", Change::HighPriority(true)),
    ];
    for (name, change) in changes {
        let standin = StandIn::mount(&[0, 1]);
        let plan = plan(&[(0, Some(GIB)), (1, Some(GIB))]);
        activated(&standin, A, &plan);
        standin.fail(Fault::IgnoresWrite { gpu: 1, name });
        let error = km(&standin).set(tenant(A, &plan), change).unwrap_err();
        let start = format!("the module reported success, but {name} of GPU 1 is ");
        assert!(error.to_string().starts_with(&start), "{error}");
        for gpu in [0, 1] {
            assert_eq!(standin.instance(gpu, A, "weight"), 1, "after {name}");
            assert_eq!(standin.instance(gpu, A, "highprio"), 0, "after {name}");
            assert_eq!(standin.gpu(gpu, "policy"), 1, "after {name}");
        }
    }
}

/// If a change could not be undone, the error says where.
#[test]
fn failed_undo_of_a_change_is_reported() {
    let standin = StandIn::mount(&[0, 1]);
    let plan = plan(&[(0, Some(GIB)), (1, Some(GIB))]);
    activated(&standin, A, &plan);
    standin.fail(Fault::IgnoresWriteAfter { gpu: 0, name: "highprio", writes: 1 });
    standin.fail(Fault::IgnoresWrite { gpu: 1, name: "highprio" });
    assert_eq!(
        km(&standin).set(tenant(A, &plan), Change::HighPriority(true)).unwrap_err().to_string(),
        "the module reported success, but highprio of GPU 1 is 0, not 1; see the kernel log; \
         and it could not be undone: the module reported success, but highprio of GPU 0 is 1, \
         not 0; see the kernel log"
    );
}

#[test]
fn refuses_to_change_what_is_not_there() {
    let standin = StandIn::mount(&[0, 1]);
    let quota = plan(&[(0, Some(GIB)), (1, Some(GIB))]);
    let set = |plan: &Plan, change| km(&standin).set(tenant(A, plan), change).unwrap_err();
    let sentence = "the module has no instance 12b2edccd7aa on GPU 0; the container has ended, \
                    or has no quota there";
    for change in [
        Change::MemoryLimit { gpu_index: 0, bytes: GIB },
        Change::Weight(2),
        Change::HighPriority(true),
    ] {
        assert_eq!(set(&quota, change).to_string(), sentence);
    }
    assert_eq!(
        set(&plan(&[(0, None)]), Change::Weight(2)).to_string(),
        "12b2edccd7aa has no GPU under a quota, so its weight and priority can't be changed; \
         create it anew with a quota"
    );
    assert_eq!(writes(&standin), [""; 0]);
}

#[test]
fn tree_is_writable_by_everyone_like_the_original() {
    let standin = StandIn::mount(&[0]);
    standin.plant(0, A);
    let mode = |path: &str| fs::metadata(standin.path().join(path)).unwrap().permissions().mode();
    assert_eq!(mode("inst_ctl") & 0o777, 0o222);
    assert_eq!(mode(&format!("0/{A}/memsize")) & 0o777, 0o666);
    assert_eq!(mode("0/free_weight") & 0o777, 0o444);
}
