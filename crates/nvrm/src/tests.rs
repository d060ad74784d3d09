// All of `rm`: fixtures, hostile bytes, and the driver's own headers.

#![allow(clippy::wildcard_imports, reason = "vocabularies, spelt as upstream does")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command as Program;

use proptest::prelude::*;

use super::call::{Alloc, MAX_WRAPPED_BYTES, Object, VidHeap};
use super::number::*;
use super::release::{Change, RELEASES};
use super::*;

macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/", $name, ".bin"))
    };
}

const MEMORY: Object = Object { client: 0xc1d0_0001, parent: 0xcaf0_0001, handle: 0xcaf0_0002 };

fn release(text: &str) -> Release {
    Release::of(text.parse().unwrap()).unwrap()
}

/// Everything that a release has a layout of, in order.
fn all_layouts(release: &Release) -> BTreeMap<Key, &'static [Layout]> {
    let changes = RELEASES.iter().flat_map(|row| row.changes);
    let keys = changes.map(|change| match change {
        Change::Set(key, _) | Change::Remove(key) => *key,
    });
    let all = keys.map(|key| (key, release.layouts(key)));
    all.filter(|(_, layouts)| !layouts.is_empty()).collect()
}

/// An ioctl as the driver's users make it: `_IOWR('F', number, size)`.
fn iowr(number: u32, size: usize) -> Command {
    let size = u32::try_from(size).unwrap();
    Command::of_ioctl(3 << 30 | size << 16 | u32::from(b'F') << 8 | number)
}

fn decoded(text: &str, number: u32, bytes: &[u8]) -> Call {
    decode(&release(text), iowr(number, bytes.len()), bytes).unwrap().call
}

/// An allocation is read alike from each release's struct.
#[test]
fn allocation_is_read_alike_from_every_release() {
    let alloc = |params_size| {
        let (class, params) = (NV01_MEMORY_LOCAL_USER, 0x7ffc_1234_5678);
        let does = class::class_use(class).does;
        Call::Alloc(Alloc { object: MEMORY, class, does, params, params_size, rights: 0 })
    };
    for (text, bytes, stated, status) in [
        ("515.43.04", &fixture!("515.43.04/rm_alloc_40")[..], None, 32),
        ("525.60.11", fixture!("525.60.11/rm_alloc_40"), None, 36),
        ("535.161.08", fixture!("535.161.08/rm_alloc_32"), Some(120), 28),
        ("535.161.08", fixture!("535.161.08/rm_alloc_48"), Some(120), 40),
    ] {
        assert_eq!(decoded(text, NV_ESC_RM_ALLOC, bytes), alloc(stated));
        let found = decode(&release(text), iowr(NV_ESC_RM_ALLOC, bytes.len()), bytes).unwrap();
        let patch = refuse::status(found.layout.unwrap(), NV_ERR_NO_MEMORY).unwrap();
        assert_eq!(patch.offset(), status, "{text}");
    }
}

/// Serialized parameters are refused, and their flag is in the place of the old struct's status.
#[test]
fn serialized_parameters_are_refused_by_their_flag() {
    let bytes = fixture!("535.161.08/rm_alloc_48_serialized");
    let refusal = decode(&release("535.161.08"), iowr(NV_ESC_RM_ALLOC, 48), bytes).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "driver 535.161.08: NV_ESC_RM_ALLOC with serialized parameters, which are not read"
    );
    assert_eq!(refusal.answer(), Answer::Status(NV_ERR_NOT_SUPPORTED));
    // Where 525 has flags 515 has the status, which means nothing on the way in.
    let bytes = fixture!("515.43.04/rm_alloc_40");
    assert!(decode(&release("525.60.11"), iowr(NV_ESC_RM_ALLOC, 40), bytes).is_err());
}

#[test]
fn memory_sizes_are_read_from_every_releases_parameters() {
    for (text, bytes) in [
        ("535.161.08", &fixture!("535.161.08/memory_params")[..]),
        ("550.54.14", fixture!("550.54.14/memory_params")),
    ] {
        let found = memory::decode(&release(text), NV01_MEMORY_LOCAL_USER, bytes).unwrap();
        assert_eq!(found.size_bytes, 512 << 20);
        assert_eq!(memory::given_bytes(found.layout, bytes), Some(512 << 20));
    }
    let bytes = fixture!("550.54.14/memory_params");
    let refusal = memory::decode(&release("535.161.08"), 0x40, bytes).unwrap_err();
    assert_eq!(refusal.to_string(), "driver 535.161.08: class 0x40 of 128 bytes, known is 120");
}

#[test]
fn heap_functions_have_the_drivers_class_and_size() {
    for (bytes, wanted) in [
        (
            fixture!("535.161.08/vid_heap_alloc_size"),
            (0xcaf0_0003, NV01_MEMORY_LOCAL_USER, 3 << 20),
        ),
        (fixture!("535.161.08/vid_heap_alloc_range"), (0, NV01_MEMORY_SYSTEM, 3 << 20)),
        (
            fixture!("535.161.08/vid_heap_alloc_tiled"),
            (0xcaf0_0003, NV01_MEMORY_LOCAL_USER, 1080 * 8192),
        ),
    ] {
        let call = decoded("535.161.08", NV_ESC_RM_VID_HEAP_CONTROL, bytes);
        let Call::VidHeap { client, parent, function } = call else { panic!("{call:?}") };
        assert_eq!((client, parent), (MEMORY.client, MEMORY.parent));
        let VidHeap::Alloc { handle, class, size_bytes, .. } = function else {
            panic!("{function:?}")
        };
        assert_eq!((handle, class, size_bytes), wanted);
    }
}

#[test]
fn heap_memory_is_the_gpus_unless_stated_otherwise() {
    let class = |flags: u32, attributes: u32, attributes2: u32| {
        let mut bytes = *fixture!("535.161.08/vid_heap_alloc_size");
        bytes[52..56].copy_from_slice(&flags.to_le_bytes());
        bytes[56..60].copy_from_slice(&attributes.to_le_bytes());
        bytes[144..148].copy_from_slice(&attributes2.to_le_bytes());
        match decoded("550.54.14", NV_ESC_RM_VID_HEAP_CONTROL, &bytes) {
            Call::VidHeap { function: VidHeap::Alloc { class, .. }, .. } => class,
            call => panic!("{call:?}"),
        }
    };
    assert_eq!(class(0, 0xf9ff_ffff, 0), NV01_MEMORY_LOCAL_USER);
    for location in 1..=3 {
        assert_eq!(class(0, location << 25, 0), NV01_MEMORY_SYSTEM);
    }
    assert_eq!(class(0, 1 << 25, 1 << 24), NV_MEMORY_EXTENDED_USER);
    assert_eq!(class(NVOS32_ALLOC_FLAGS_VIRTUAL, 0, 1 << 24), NV50_MEMORY_VIRTUAL);
}

#[test]
fn other_calls_are_read() {
    let text = "535.161.08";
    let free = decoded(text, NV_ESC_RM_FREE, fixture!("535.161.08/rm_free"));
    assert_eq!(free, Call::Free(MEMORY));
    let dup = decoded(text, NV_ESC_RM_DUP_OBJECT, fixture!("535.161.08/rm_dup_object"));
    let object = Object { client: 0xc1d0_0002, parent: 0xcaf0_0001, handle: 0xcaf0_0009 };
    let (source_client, source) = (MEMORY.client, MEMORY.handle);
    assert_eq!(dup, Call::Dup { object, source_client, source });
    let control = decoded(text, NV_ESC_RM_CONTROL, fixture!("535.161.08/rm_control"));
    let wanted = Call::Control {
        client: MEMORY.client,
        object: MEMORY.handle,
        command: NV2080_CTRL_CMD_FB_GET_INFO_V2,
        params: 0x7ffc_1234_5678,
        params_size: 436,
        flags: 0,
    };
    assert_eq!(control, wanted);
    let memory = decoded(text, NV_ESC_RM_ALLOC_MEMORY, fixture!("535.161.08/rm_alloc_memory"));
    assert_eq!(memory, Call::AllocMemory { object: MEMORY, class: NV01_MEMORY_SYSTEM });
}

#[test]
fn uvm_calls_are_read_from_each_releases_struct() {
    for (text, bytes) in [
        ("535.161.08", &fixture!("535.161.08/uvm_map_external")[..]),
        ("550.54.14", fixture!("550.54.14/uvm_map_external")),
    ] {
        let size = uvm::params_size(&release(text), UVM_MAP_EXTERNAL_ALLOCATION);
        assert_eq!(size, Ok(bytes.len()));
        let found = uvm::decode(&release(text), UVM_MAP_EXTERNAL_ALLOCATION, bytes).unwrap();
        let memory = uvm::Source { descriptor: 5, client: MEMORY.client, handle: MEMORY.handle };
        let range = uvm::Range { base: 0x7f00_0000_0000, length: 0x20_0000 };
        assert_eq!(found.call, uvm::Call::MapExternal { range, memory });
        let layout = found.layout.unwrap();
        let mut bytes = bytes.to_vec();
        for (count, known) in [(0, false), (1, true), (2, true), (32, true), (257, false)] {
            assert!(layout.patch(Meaning::Count, count).unwrap().apply(&mut bytes));
            let gpus = uvm::mapping_gpus(layout, &bytes);
            assert_eq!(gpus.is_some(), known, "{count}");
            if let Some(gpus) = gpus {
                assert_eq!(gpus.len() as u64, count);
                let of = |at: usize| bytes[24 + 36 * at..][..16].to_vec();
                assert!(gpus.iter().enumerate().all(|(at, gpu)| gpu[..] == of(at)));
            }
        }
    }
    for (text, bytes, length) in [
        ("535.161.08", &fixture!("535.161.08/uvm_free")[..], Some(0x20_0000)),
        ("590.48.01", fixture!("590.48.01/uvm_free"), None),
    ] {
        let found = uvm::decode(&release(text), UVM_FREE, bytes).unwrap();
        assert_eq!(found.call, uvm::Call::Free { base: 0x7f00_0000_0000, length });
    }
}

#[test]
fn uvm_is_initialized_without_hmm_whatever_was_asked() {
    let release = release("550.54.14");
    for flags in [0_u64, 1, 2, u64::MAX] {
        let mut bytes = [0xee; 16];
        bytes[..8].copy_from_slice(&flags.to_le_bytes());
        let found = uvm::decode(&release, UVM_INITIALIZE, &bytes).unwrap();
        assert_eq!(found.call, uvm::Call::Initialize { flags });
        assert!(uvm::without_hmm(found.layout.unwrap(), flags).unwrap().apply(&mut bytes));
        assert_eq!(bytes[..8], (flags | 1).to_le_bytes());
        assert_eq!(bytes[8..], [0xee; 8]);
    }
}

#[test]
fn uvm_calls_reaching_into_processes_are_unknown() {
    let release = release("550.54.14");
    for number in [62, 63, 0x3000_0003, 0x3000_0001 + (1 << 16), 33 | u32::from(b'F') << 8] {
        let refusal = uvm::params_size(&release, number).unwrap_err();
        assert_eq!(refusal.answer(), Answer::Errno(refuse::EINVAL));
    }
}

#[test]
fn the_wrapper_is_unwrapped_once() {
    let release = release("535.161.08");
    let outer = iowr(NV_ESC_IOCTL_XFER_CMD, 16);
    let found = decode(&release, outer, fixture!("535.161.08/xfer")).unwrap().call;
    let Call::Wrapped { command, address } = found else { panic!("{found:?}") };
    assert_eq!((command.number(), command.size(), address), (0x2b, 48, 0x7ffc_1234_5678));
    let inner = decode(&release, command, fixture!("535.161.08/rm_alloc_48")).unwrap().call;
    assert!(matches!(inner, Call::Alloc(Alloc { class: NV01_MEMORY_LOCAL_USER, .. })));

    let refusal = decode(&release, outer, fixture!("535.161.08/xfer_nested")).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "driver 535.161.08: NV_ESC_IOCTL_XFER_CMD within itself; the driver unwraps once"
    );
}

/// The number of a wrapped call is taken in full, not by its low byte, and the call's size is
/// bounded.
#[test]
fn wrapped_number_is_read_fully_with_bounded_size() {
    let release = release("535.161.08");
    let wrapped = |number: u32, size: u32| {
        let mut bytes = *fixture!("535.161.08/xfer");
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        decode(&release, iowr(NV_ESC_IOCTL_XFER_CMD, 16), &bytes)
    };
    let largest = u32::try_from(MAX_WRAPPED_BYTES).unwrap();
    assert!(wrapped(NV_ESC_RM_ALLOC, largest).is_ok());
    assert!(wrapped(NV_ESC_RM_ALLOC, largest + 1).is_err());
    assert!(wrapped(NV_ESC_RM_ALLOC, u32::MAX).is_err());
    // 0x1002b is NV_ESC_RM_ALLOC to code that reads a byte; the driver doesn't.
    let Call::Wrapped { command, .. } = wrapped(0x1_002b, 48).unwrap().call else {
        panic!("it is wrapped")
    };
    assert!(matches!(
        decode(&release, command, fixture!("535.161.08/rm_alloc_48")),
        Err(Refusal::UnknownCall { .. })
    ));
}

#[test]
fn type_byte_and_direction_are_not_looked_at() {
    let plain = iowr(NV_ESC_RM_ALLOC, 48);
    for kind in 0..=255_u32 {
        for high in [0, 1 << 30, 2 << 30, 3 << 30] {
            assert_eq!(Command::of_ioctl(high | 48 << 16 | kind << 8 | 0x2b), plain);
        }
    }
}

/// A struct of another size is refused with the sizes that are known.
#[test]
fn struct_of_another_size_is_refused_naming_sizes() {
    let release = release("535.161.08");
    for number in [
        NV_ESC_RM_ALLOC,
        NV_ESC_RM_ALLOC_MEMORY,
        NV_ESC_RM_ALLOC_OBJECT,
        NV_ESC_RM_VID_HEAP_CONTROL,
        NV_ESC_RM_FREE,
        NV_ESC_RM_DUP_OBJECT,
        NV_ESC_RM_CONTROL,
        NV_ESC_IOCTL_XFER_CMD,
        NV_ESC_EXPORT_TO_DMABUF_FD,
    ] {
        let known: Vec<usize> =
            release.layouts(Key::Escape(number)).iter().map(Layout::size).collect();
        for size in 0..4096 {
            let found = decode(&release, iowr(number, size), &vec![0; size]);
            match found {
                Err(Refusal::UnknownSize { stated, known: ref said, .. }) => {
                    assert_eq!((stated, said), (size, &known));
                }
                _ => assert!(known.contains(&size), "{number:#x} of {size}: {found:?}"),
            }
        }
    }
    let refusal = decode(&release, iowr(NV_ESC_RM_ALLOC, 44), &[0; 44]).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "driver 535.161.08: NV_ESC_RM_ALLOC of 44 bytes, known is 32 or 48"
    );
    assert_eq!(refusal.answer(), Answer::Errno(refuse::EINVAL));
}

#[test]
fn unknown_calls_are_refused_and_harmless_ones_pass() {
    let release = release("535.161.08");
    let refusal = decode(&release, iowr(0x99, 8), &[0; 8]).unwrap_err();
    assert_eq!(refusal.to_string(), "driver 535.161.08: call 0x99 of 8 bytes is not known");
    let found = decode(&release, iowr(NV_ESC_CHECK_VERSION_STR, 72), &[0; 72]).unwrap();
    assert_eq!(found.call, Call::Other);
    assert!(decode(&release, iowr(NV_ESC_CHECK_VERSION_STR, 71), &[0; 71]).is_err());
    let mut bytes = *fixture!("535.161.08/vid_heap_alloc_size");
    bytes[8] = 99;
    let refusal = decode(&release, iowr(NV_ESC_RM_VID_HEAP_CONTROL, 184), &bytes).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "driver 535.161.08: NV_ESC_RM_VID_HEAP_CONTROL function 99 of 184 bytes is not known"
    );
}

#[test]
fn truncated_at_any_byte_nothing_is_read() {
    let release = release("535.161.08");
    let bytes = [0; 184];
    for (key, layouts) in all_layouts(&release) {
        for layout in layouts {
            for len in 0..layout.size().min(bytes.len()) {
                let short = &bytes[..len];
                match key {
                    Key::Escape(number) => {
                        assert!(decode(&release, iowr(number, layout.size()), short).is_err());
                    }
                    Key::Uvm(number) => assert!(uvm::decode(&release, number, short).is_err()),
                    Key::Class(class) => assert!(memory::decode(&release, class, short).is_err()),
                    Key::Control(command) => {
                        assert!(fbinfo::list(&release, command, short).is_err());
                    }
                    Key::VidHeap(_) => assert!(layout.view(short).is_none()),
                }
            }
        }
    }
}

/// A layout that lacks a field of its decoder shows here.
#[test]
fn every_releases_calls_can_be_decoded() {
    for row in RELEASES {
        let release = Release::of(row.version).unwrap();
        for (key, layouts) in all_layouts(&release) {
            for layout in layouts {
                let mut bytes = vec![0; layout.size()];
                match key {
                    Key::Escape(NV_ESC_RM_VID_HEAP_CONTROL) => {}
                    Key::Escape(number) => {
                        decode(&release, iowr(number, layout.size()), &bytes).unwrap();
                    }
                    Key::VidHeap(function) => {
                        bytes[8..12].copy_from_slice(&function.to_le_bytes());
                        let command = iowr(NV_ESC_RM_VID_HEAP_CONTROL, layout.size());
                        decode(&release, command, &bytes).unwrap();
                    }
                    Key::Uvm(number) => drop(uvm::decode(&release, number, &bytes).unwrap()),
                    Key::Class(
                        NV01_DEVICE_0
                        | NV20_SUBDEVICE_0
                        | KEPLER_CHANNEL_GROUP_A
                        | NV_SEMAPHORE_SURFACE,
                    ) => assert!(layout.view(&bytes).is_some()),
                    Key::Class(class) => {
                        let found = memory::decode(&release, class, &bytes).unwrap();
                        assert_eq!(memory::given_bytes(found.layout, &bytes), Some(1));
                    }
                    Key::Control(
                        command @ (NV2080_CTRL_CMD_FB_GET_INFO | NV2080_CTRL_CMD_FB_GET_INFO_V2),
                    ) => drop(fbinfo::list(&release, command, &bytes).unwrap()),
                    Key::Control(_) => assert!(layout.view(&bytes).is_some()),
                }
            }
        }
    }
}

fn any_release() -> impl Strategy<Value = Release> {
    (0..RELEASES.len()).prop_map(|at| Release::of(RELEASES[at].version).unwrap())
}

proptest! {
    #[test]
    fn decoders_never_panic(
        release in any_release(),
        request in any::<u32>(),
        class in 0_u32..0x100,
        bytes in proptest::collection::vec(any::<u8>(), 0..512),
    ) {
        let _ = decode(&release, Command::of_ioctl(request), &bytes);
        let _ = uvm::decode(&release, request, &bytes);
        let _ = memory::decode(&release, class, &bytes);
    }

    #[test]
    fn bytes_of_known_size_are_read_or_refused(
        release in any_release(),
        which in any::<prop::sample::Index>(),
        seed in proptest::collection::vec(any::<u8>(), 1..256),
    ) {
        let all: Vec<_> = all_layouts(&release).into_iter().collect();
        let (key, layouts) = all[which.index(all.len())];
        for layout in layouts {
            let bytes: Vec<u8> = seed.iter().copied().cycle().take(layout.size()).collect();
            match key {
                Key::Escape(number) => {
                    let found = decode(&release, iowr(number, bytes.len()), &bytes);
                    if let Ok(Decoded { call: Call::Wrapped { command, .. }, .. }) = found {
                        let wrapped = decode(&release, command, &vec![0; command.size()]);
                        let nested = matches!(
                            wrapped, Ok(Decoded { call: Call::Wrapped { .. }, .. })
                        );
                        prop_assert!(!nested);
                    }
                }
                Key::Uvm(number) => {
                    prop_assert!(uvm::decode(&release, number, &bytes).is_ok());
                }
                Key::Control(command) => {
                    if let Ok(fbinfo::List::Inline { offset, entries }) =
                        fbinfo::list(&release, command, &bytes)
                    {
                        let shown = fbinfo::MemoryAmounts { total_bytes: 1 << 40, free_bytes: 0 };
                        let mut copy = bytes.clone();
                        for patch in fbinfo::patches(&bytes, offset, entries, shown) {
                            prop_assert!(patch.apply(&mut copy));
                        }
                    }
                }
                Key::Class(_) | Key::VidHeap(_) => {
                    prop_assert!(layout.view(&bytes).is_some());
                }
            }
        }
    }
}

/// Compares all that is said here with the driver's headers, by compiling them.
///
/// `NV_SRC` is an unpacked source; `NV_SRC_VERSION` its version, where it has no
/// `version.mk`. Of a source without the RM's headers (before 515.43.04) UVM's calls and
/// the numbers are compared.
#[test]
fn numbers_sizes_and_offsets_match_the_headers() {
    let Some(source) = std::env::var_os("NV_SRC").map(PathBuf::from) else {
        eprintln!("skipped: NV_SRC names no unpacked source of the driver");
        return;
    };
    let version = version_of(&source);
    let release = Release::of(version.parse().unwrap()).unwrap();
    let headers = Headers::of(&source);
    let mut wanted: Vec<(String, u64)> = Vec::new();
    let mut program = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in &headers.present {
        writeln!(program, "#include \"{header}\"").unwrap();
    }
    program.push_str("int main(void) {\n");
    for (header, name, value) in number::ALL {
        if headers.has(header) {
            // Statuses are of an enum. Numbers that a release lacks are not compared.
            let is_enum = *header == "nvstatuscodes.h";
            let (before, after) = if is_enum { ("", "") } else { ("#ifdef ", "#endif\n") };
            let guard = if is_enum { String::new() } else { format!("{before}{name}\n") };
            writeln!(program, "{guard}printf(\"{name} %llu\\n\", (unsigned long long)({name}));")
                .unwrap();
            program.push_str(after);
            wanted.push(((*name).to_owned(), u64::from(*value)));
        }
    }
    let mut structs = 0;
    for (_, layouts) in all_layouts(&release) {
        for layout in layouts.iter().filter(|layout| headers.declare(layout.name())) {
            let name = layout.name();
            let mut ask = |what: String, value: usize| {
                writeln!(program, "printf(\"{what} %zu\\n\", {what});").unwrap();
                wanted.push((what, u64::try_from(value).unwrap()));
            };
            // NVOS21 and NVOS64 each have one size at a time.
            ask(format!("sizeof({name})"), layout.size());
            for field in layout.fields() {
                ask(format!("offsetof({name},{})", field.name), field.offset);
                ask(format!("sizeof((({name}*)0)->{})", field.name), field.width);
            }
            structs += 1;
        }
    }
    // A shape of another release has another size, and is left alone there.
    let shapes: Vec<&control::Nested> =
        control::NESTED.iter().filter(|nested| headers.declare_all(nested)).collect();
    for nested in &shapes {
        let name = nested.name;
        writeln!(program, "if (sizeof({name}) == {}) {{", nested.size).unwrap();
        for array in nested.arrays {
            let mut ask = |what: String, value: usize| {
                writeln!(program, "printf(\"{what} %zu\\n\", (size_t){what});").unwrap();
                wanted.push((what, u64::try_from(value).unwrap()));
            };
            ask(format!("offsetof({name},{})", array.name), array.offset);
            if let control::Length::Count(field, at, _) | control::Length::Square(field, at, _) =
                array.length
            {
                ask(format!("offsetof({name},{field})"), at);
            }
        }
        writeln!(program, "}} else printf(\"other {name}\\n\");").unwrap();
    }
    program.push_str("return 0; }\n");

    let said = headers.run(&program);
    let mut compared = 0;
    for (what, value) in &wanted {
        let line = said.lines().find_map(|line| line.strip_prefix(&format!("{what} ")));
        let Some(line) = line else { continue };
        // What is refused may have another number, by which it's refused, too.
        let is_refused = |number| control::check(&release, number, 0).is_err();
        let is_one = control::REFUSED.iter().any(|(number, _)| u64::from(*number) == *value);
        if !(is_one && line.parse().is_ok_and(is_refused)) {
            assert_eq!(line, value.to_string(), "{what} of {version}");
        }
        compared += 1;
    }
    for name in shapes.iter().map(|nested| nested.name) {
        let count = shapes.iter().filter(|other| other.name == name).count();
        let others = said.lines().filter(|line| *line == format!("other {name}")).count();
        assert_eq!(others + 1, count, "{name} of {version} has no shape here");
    }
    assert!(structs > 8 && compared > 100, "{structs} structs, {compared} values of {version}");
    eprintln!("{version}: {structs} structs, {compared} values compared");
}

/// Compares what is said of controls that name clients with the driver's headers: where they do,
/// and that all that are executed are listed.
#[test]
fn controls_naming_clients_match_the_headers() {
    let Some(source) = std::env::var_os("NV_SRC").map(PathBuf::from) else {
        eprintln!("skipped: NV_SRC names no unpacked source of the driver");
        return;
    };
    let version = version_of(&source);
    let release = Release::of(version.parse().unwrap()).unwrap();
    let directory = source.join("src/common/sdk/nvidia/inc/ctrl");
    if !directory.is_dir() {
        eprintln!("skipped: {version} has no headers of controls");
        return;
    }
    let controls = Controls::of(&directory);
    let naming = controls.naming_clients();
    assert!(naming.len() >= 10, "{} controls of {version} name clients", naming.len());
    let named: Vec<&control::clients::Named> = control::clients::NAMED.iter().collect();
    for (command, params) in &naming {
        let is_listed = named.iter().any(|of| of.command == *command && of.name == *params);
        let is_made = control::check(&release, *command, 0).is_ok();
        assert!(is_listed || !is_made, "{command:#x} of {version}: {params} names a client");
    }
    let present = |of: &&&control::clients::Named| controls.structs.contains_key(of.name);
    let mut program =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include \"nvtypes.h\"\n");
    for header in &controls.headers {
        writeln!(program, "#include \"{header}\"").unwrap();
    }
    program.push_str("int main(void) {\n");
    let mut wanted = Vec::new();
    for of in named.iter().filter(present) {
        let list = of.list.as_ref();
        let count = list.map(|list| (list.count, list.offset));
        for (field, offset) in [(of.field, of.offset)].into_iter().chain(count) {
            let what = format!("offsetof({},{field})", of.name);
            writeln!(program, "printf(\"{what} %zu\\n\", {what});").unwrap();
            wanted.push(format!("{what} {offset}"));
        }
        let (what, most) =
            (format!("sizeof((({}*)0)->{})", of.name, of.field), list.map_or(1, |list| list.most));
        writeln!(program, "printf(\"{what} %zu\\n\", {what});").unwrap();
        wanted.push(format!("{what} {}", 4 * most));
    }
    program.push_str("return 0; }\n");
    let said = Headers::of(&source).run(&program);
    assert_eq!(said.lines().collect::<Vec<_>>(), wanted, "{version}");
    eprintln!("{version}: {} controls name clients, {} compared", naming.len(), wanted.len());
}

/// What the headers of controls say of their parameters.
struct Controls {
    /// As they are included.
    headers: Vec<String>,
    /// Types and names of the fields, by struct.
    structs: BTreeMap<String, Vec<(String, String)>>,
    /// By the struct of their parameters.
    commands: BTreeMap<String, u32>,
}

impl Controls {
    fn of(directory: &Path) -> Self {
        let mut found =
            Controls { headers: Vec::new(), structs: BTreeMap::new(), commands: BTreeMap::new() };
        found.read(directory, "ctrl");
        found
    }

    fn read(&mut self, directory: &Path, place: &str) {
        for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let name = format!("{place}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                self.read(&entry.path(), &name);
            } else if name.ends_with(".h") {
                self.read_header(&std::fs::read_to_string(entry.path()).unwrap());
                self.headers.push(name);
            }
        }
        self.headers.sort();
    }

    fn read_header(&mut self, text: &str) {
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (Some("#define"), Some(name), Some(value)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let digits = value.trim_matches(|of| "()uU".contains(of));
            let Some(digits) = digits.strip_prefix("0x") else { continue };
            let Ok(command) = u32::from_str_radix(digits, 16) else { continue };
            // The generator's comment names the struct; of some controls of old releases it has
            // the number.
            let of = line.rsplit_once("_MESSAGE_ID\"").and_then(|(before, _)| {
                before.rsplit_once(|of: char| !of.is_alphanumeric() && of != '_')
            });
            let params = match of {
                Some((_, params)) => params.to_owned(),
                None if name.contains("_CTRL_CMD_") => {
                    name.replacen("_CTRL_CMD_", "_CTRL_", 1) + "_PARAMS"
                }
                None => continue,
            };
            self.commands.insert(params, command);
        }
        let text = without_comments(text);
        for (_, rest) in
            text.match_indices("typedef struct ").map(|(at, of)| text.split_at(at + of.len()))
        {
            let name: String =
                rest.chars().take_while(|of| of.is_alphanumeric() || *of == '_').collect();
            let after = rest[name.len()..].trim_start();
            let body =
                after.strip_prefix('{').and_then(|body| body.split_once(&format!("}} {name};")));
            let fields = match body {
                Some((body, _)) => body.split(';').filter_map(field).collect(),
                // A struct by another name.
                None => match after.split_once(';') {
                    Some((alias, _)) if !alias.contains(|of| "{}".contains(of)) => {
                        let fields = vec![(name, "alias".to_owned())];
                        self.structs.insert(alias.trim().to_owned(), fields);
                        continue;
                    }
                    _ => continue,
                },
            };
            self.structs.insert(name, fields);
        }
    }

    /// Whether a struct has, at any depth, a handle that is a client's by its name.
    fn names_client(&self, name: &str) -> bool {
        let fields = self.structs.get(name).map(Vec::as_slice).unwrap_or_default();
        fields.iter().any(|(kind, field)| match kind.as_str() {
            "NvHandle" => field.to_lowercase().contains("client"),
            kind => kind != name && self.names_client(kind),
        })
    }

    /// The controls whose parameters have such a handle, and the structs of those.
    fn naming_clients(&self) -> Vec<(u32, &str)> {
        let all = self.structs.keys().filter(|name| self.names_client(name));
        let of_controls = all.filter_map(|name| Some((*self.commands.get(name)?, name.as_str())));
        of_controls.collect()
    }
}

/// Type and name of a field.
fn field(text: &str) -> Option<(String, String)> {
    let text = text.trim().trim_start_matches("NV_DECLARE_ALIGNED(");
    let text = text.rsplit(['{', '}']).next().unwrap_or(text);
    let text = text.split([',', '[']).next().unwrap_or(text);
    let mut words = text.split_whitespace().rev();
    let (name, kind) = (words.next()?, words.next()?);
    Some((kind.to_owned(), name.to_owned()))
}

fn without_comments(text: &str) -> String {
    let mut retained = String::new();
    for (number, part) in text.split("/*").enumerate() {
        let code =
            if number == 0 { part } else { part.split_once("*/").map_or("", |(_, code)| code) };
        retained.push_str(code);
    }
    let lines = retained.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.collect::<Vec<_>>().join("\n")
}

fn version_of(source: &Path) -> String {
    let text = std::fs::read_to_string(source.join("version.mk")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("NVIDIA_VERSION = "));
    line.map_or_else(
        || std::env::var("NV_SRC_VERSION").expect("no version.mk: NV_SRC_VERSION has to be set"),
        |version| version.trim().to_owned(),
    )
}

/// The headers of a source.
struct Headers {
    directories: Vec<PathBuf>,
    present: Vec<&'static str>,
}

impl Headers {
    fn of(source: &Path) -> Self {
        let directories: Vec<PathBuf> = [
            "src/common/sdk/nvidia/inc",
            "src/nvidia/arch/nvalloc/unix/include",
            "kernel-open/nvidia-uvm",
            "kernel-open/common/inc",
            "nvidia-uvm",
            "common/inc",
        ]
        .iter()
        .map(|part| source.join(part))
        .filter(|directory| directory.is_dir())
        .collect();
        assert!(!directories.is_empty(), "{} has no headers of the driver", source.display());
        let mut names = vec![
            "nvtypes.h",
            "nvlimits.h",
            "nvstatus.h",
            "nvos.h",
            "nv-ioctl.h",
            "nv-unix-nvos-params-wrappers.h",
            "uvm_types.h",
        ];
        names.extend(number::ALL.iter().map(|(header, ..)| *header));
        let mut present: Vec<&str> = Vec::new();
        for name in names {
            let is_new = !present.contains(&name);
            if is_new && directories.iter().any(|directory| directory.join(name).is_file()) {
                present.push(name);
            }
        }
        // What nvstatus.h makes of it is wanted, not the bare list.
        Self { directories, present }
    }

    fn has(&self, header: &str) -> bool {
        self.present.contains(&header)
    }

    /// Whether the struct is of a header that is there.
    fn declare(&self, name: &str) -> bool {
        if name.starts_with("UVM_") {
            return self.has("uvm_linux_ioctl.h");
        }
        // 470 has nv-ioctl.h and not the RM's headers; it has no exports to dma-buf.
        if matches!(name, "nv_ioctl_xfer_t" | "nv_ioctl_register_fd_t") {
            return self.has("nv-ioctl.h");
        }
        self.has("nvos.h")
    }

    /// Whether the struct is declared, with all the fields that point at something.
    fn declare_all(&self, nested: &control::Nested) -> bool {
        let (begin, end) = (format!("struct {} {{", nested.name), format!("}} {};", nested.name));
        let paths = self.present.iter().flat_map(|header| {
            self.directories.iter().map(move |directory| directory.join(header))
        });
        let mut texts = paths.filter_map(|path| std::fs::read_to_string(path).ok());
        texts.any(|text| {
            let body = text.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end));
            body.is_some_and(|(body, _)| {
                nested.arrays.iter().all(|array| body.contains(array.name))
            })
        })
    }

    /// What the program says.
    fn run(&self, program: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let (text, binary) = (directory.path().join("ask.c"), directory.path().join("ask"));
        let included = program.replace("#include \"nvstatuscodes.h\"\n", "");
        std::fs::write(&text, included).unwrap();
        let mut compiler = Program::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-w", "-DNV_UNIX", "-DNV_LINUX", "-DNVCPU_X86_64"]);
        for include in &self.directories {
            compiler.arg("-I").arg(include);
        }
        let compiled = compiler.arg(&text).arg("-o").arg(&binary).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        String::from_utf8(Program::new(&binary).output().unwrap().stdout).unwrap()
    }
}
