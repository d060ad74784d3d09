//! Whatever a container calls the driver with is read to the byte or refused.
#![no_main]

use nvrm::control::{self, MAX_PIECES_BYTES, Pieces, processes};
use nvrm::fbinfo::{List, MemoryAmounts, list, patches};
use nvrm::{Call, Command, Decoded, Release, decode, low_word, memory, refuse, uvm};
use libfuzzer_sys::fuzz_target;

/// One release before, between and after the rows of the table.
const VERSIONS: [&str; 8] = [
    "470.256.02",
    "515.43.04",
    "525.60.11",
    "535.161.08",
    "550.54.14",
    "570.86.15",
    "590.48.01",
    "620.06",
];

fuzz_target!(|input: (u8, u64, u32, &[u8])| {
    let (at, argument, class, bytes) = input;
    let request = low_word(argument);
    let version = VERSIONS[usize::from(at) % VERSIONS.len()].parse().expect("it is a version");
    let release = Release::of(version).expect("it is served");

    let command = Command::of_ioctl(request);
    if let Ok(Decoded { call, layout }) = decode(&release, command, bytes) {
        assert_eq!(bytes.len(), command.size());
        if let Some(patch) = layout.and_then(|layout| refuse::status(layout, 0x51)) {
            assert!(patch.apply(&mut bytes.to_vec()));
        }
        if let Call::Wrapped { command, .. } = call {
            let inner = decode(&release, command, &vec![0; command.size()]);
            assert!(!matches!(inner, Ok(Decoded { call: Call::Wrapped { .. }, .. })));
        }
    }
    if let Ok(found) = uvm::decode(&release, request, bytes) {
        assert_eq!(uvm::params_size(&release, request), Ok(bytes.len()));
        assert!(found.layout.is_none_or(|layout| layout.size() == bytes.len()));
    }
    if let Ok(found) = memory::decode(&release, class, bytes) {
        let _ = memory::given_bytes(found.layout, bytes);
    }
    let _ = memory::params_size(&release, class, Some(request));
    let nested = &control::NESTED[usize::from(at) % control::NESTED.len()];
    let mut params: Vec<u8> =
        bytes.iter().copied().chain(std::iter::repeat(0)).take(nested.size).collect();
    if let Ok(pieces) = Pieces::of(nested.command, &params) {
        let before = params.clone();
        assert!(pieces.bytes() <= MAX_PIECES_BYTES);
        assert!(pieces.to_copies(argument).all(|patch| patch.apply(&mut params)));
        assert!(pieces.back().all(|patch| patch.apply(&mut params)));
        assert_eq!(params, before);
    }
    let mut reported = bytes.to_vec();
    processes::ask(request, &mut reported, |pid| pid.checked_add(1));
    processes::show(request, &mut reported, bytes, |pid| pid.checked_sub(1));
    if let Ok(List::Inline { offset, entries }) = list(&release, request, bytes) {
        let shown = MemoryAmounts { total_bytes: argument, free_bytes: argument / 2 };
        let mut copy = bytes.to_vec();
        for patch in patches(bytes, offset, entries, shown) {
            assert!(patch.apply(&mut copy));
        }
    }
});
