//! The system calls that a monitor never makes: from before its first call of the container's on, a seccomp filter
//! refuses them.
//!
//! The monitor parses what hostile programs give it, with `CAP_SYS_PTRACE`. Without the calls in this list it can start
//! no process, change no mount, namespace or kernel, and attach to no process; it can execute nothing but the program
//! that an update hands to it as a descriptor ([`PROGRAM`]). It can still read and write the memory of processes, take
//! duplicates of their descriptors, and end them: that is its work.

use nix::libc::{self, sock_filter};

use crate::gate::bpf::{
    ARCHITECTURE, FIFTH_ARGUMENT, FIRST_ARGUMENT, Label, NUMBER, Step, assemble, errno,
};
use crate::gate::inherited::PROGRAM;

/// The calls that fail with `EPERM`.
const DENIED: &[libc::c_long] = &[
    // Other programs and processes. `clone` may start threads alone.
    libc::SYS_execve,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    libc::SYS_ptrace,
    // Mounts and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknodat,
    // The kernel.
    libc::SYS_bpf,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_quotactl,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    // Large interfaces of the kernel that are of no use here.
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_fanotify_init,
    libc::SYS_seccomp,
];

/// `AUDIT_ARCH_*` of linux/audit.h for this program.
#[cfg(target_arch = "x86_64")]
const OWN_ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const OWN_ARCHITECTURE: u32 = 0xc000_00b7;

/// The bit of x32's numbers: calls by the other entries of the kernel are all refused.
const X32: u32 = 0x4000_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Jump {
    Next,
    Clone,
    Execute,
    Allow,
    Enosys,
    Eperm,
}

impl Label for Jump {
    const NEXT: Self = Jump::Next;
}

pub(crate) fn program() -> Vec<sock_filter> {
    let number = |call: libc::c_long| u32::try_from(call).unwrap_or(u32::MAX);
    let mut steps = vec![
        Step::Load(ARCHITECTURE),
        Step::IfEqual(OWN_ARCHITECTURE, Jump::Next, Jump::Eperm),
        Step::Load(NUMBER),
        Step::IfAny(X32, Jump::Eperm, Jump::Next),
        Step::IfEqual(number(libc::SYS_clone), Jump::Clone, Jump::Next),
        Step::IfEqual(number(libc::SYS_execveat), Jump::Execute, Jump::Next),
        // Its flags lie in memory. The C library starts threads by `clone` on a kernel without it.
        Step::IfEqual(number(libc::SYS_clone3), Jump::Enosys, Jump::Next),
    ];
    steps.extend(DENIED.iter().map(|call| Step::IfEqual(number(*call), Jump::Eperm, Jump::Next)));
    steps.extend([
        Step::Return(libc::SECCOMP_RET_ALLOW),
        Step::Here(Jump::Clone),
        Step::Load(FIRST_ARGUMENT),
        Step::IfAny(libc::CLONE_THREAD.cast_unsigned(), Jump::Allow, Jump::Eperm),
        // An update, of the descriptor that has the new program, without a path.
        Step::Here(Jump::Execute),
        Step::Load(FIRST_ARGUMENT),
        Step::IfEqual(PROGRAM.cast_unsigned(), Jump::Next, Jump::Eperm),
        Step::Load(FIFTH_ARGUMENT),
        Step::IfEqual(libc::AT_EMPTY_PATH.cast_unsigned(), Jump::Allow, Jump::Eperm),
        Step::Here(Jump::Allow),
        Step::Return(libc::SECCOMP_RET_ALLOW),
        Step::Here(Jump::Enosys),
        Step::Return(errno(libc::ENOSYS)),
        Step::Here(Jump::Eperm),
        Step::Return(errno(libc::EPERM)),
    ]);
    assemble(&steps)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io;
    use std::process::Command;

    use nix::errno::Errno;
    use nix::sched::{CloneFlags, setns, unshare};
    use nix::sys::prctl::set_no_new_privs;

    use super::*;
    use crate::gate::entry::confine;

    /// In a thread of its own, which takes its filter along.
    #[test]
    fn a_confined_thread_starts_threads_and_no_processes() {
        let confined = || {
            set_no_new_privs().unwrap();
            let namespace = File::open("/proc/self/ns/uts").unwrap();
            let nothing = || unshare(CloneFlags::empty());
            assert_eq!(nothing(), Ok(()), "it may be asked for");
            confine(program()).unwrap();
            assert_eq!(nothing(), Err(Errno::EPERM));
            assert_eq!(setns(namespace, CloneFlags::CLONE_NEWUTS), Err(Errno::EPERM));
            let spawned = Command::new("true").spawn().map_err(|error| error.kind());
            assert_eq!(spawned.err(), Some(io::ErrorKind::PermissionDenied));
            assert_eq!(
                confine(program()).map_err(|error| error.kind()),
                Err(io::ErrorKind::PermissionDenied)
            );
            // What its work takes: a thread, which has the filter, too.
            let within = std::thread::spawn(move || unshare(CloneFlags::empty()));
            assert_eq!(within.join().unwrap(), Err(Errno::EPERM));
            std::fs::read_to_string("/proc/self/stat").unwrap();
        };
        std::thread::spawn(confined).join().unwrap();
    }
}
