//! Controls: which can be made for a caller on copies of its parameters, and how.
//!
//! What is *flat* has nothing in its parameters but numbers; `flat.rs` lists them, made from the
//! headers. What is *nested* has arrays elsewhere, by address: [`Pieces`] says what to copy, and
//! puts addresses of copies in the place of the caller's. Of both those are made that `served.rs`
//! lists, each for its reason; `withheld.rs` says of some others why they aren't. What shows memory
//! is in [`fbinfo`](super::fbinfo), what puts it into files in [`export`](super::export), what
//! reports processes in [`processes`], what names clients in [`clients`]. So of all these no
//! address that the caller chose reaches the driver, which would follow it in the memory of the
//! process that makes the call.
//!
//! What is *opaque* ([`ControlKind::Opaque`]) is known by a bit of its number, by its class, or by
//! name, and is in no table: it is made as it is, unless one of the lists refuses it. Its
//! parameters may hold any address but one of the calling process's own. What is none of these is
//! refused, and reported once.
//!
//! The driver compares the size of parameters with its own, but for those that are converted for
//! old programs (`rmapi_deprecated_control.c`): it reads their struct whatever size is stated. So
//! here a nested control has its size or is refused.

mod flat;
mod served;
mod withheld;

pub mod clients;
pub mod processes;

use super::export;
use super::layout::Patch;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::refuse::{Answer, Refusal};
use super::release::Release;

/// Most bytes of parameters. The driver's own bound is 1 MiB
/// (`RMAPI_PARAM_COPY_MAX_PARAMS_SIZE`), its largest flat struct has 65,552.
pub const MAX_PARAMS_BYTES: usize = 128 << 10;

/// Most bytes of all that parameters point at.
pub const MAX_PIECES_BYTES: usize = 128 << 10;

/// Most arrays that parameters point at.
pub const MAX_PIECES: usize = 3;

/// `RM_GSS_LEGACY_MASK` of `rmapi_deprecated.h`.
const RM_GSS_LEGACY_MASK: u32 = 0x8000;

/// Flags of the call that leave the parameters what they are: they choose locks.
const LOCK_FLAGS: u32 = NVOS54_FLAGS_IRQL_RAISED | NVOS54_FLAGS_LOCK_BYPASS;

/// What is known of a control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlKind {
    /// Its parameters are numbers.
    Flat,
    /// It's handed on to the GPU's firmware as it is, and its parameters are published nowhere.
    /// They have no use for an address of the caller's; that there is none of ours has to be
    /// checked ([`points_into`]).
    Opaque,
    /// Its parameters point at arrays.
    Nested,
    /// It shows memory: [`fbinfo`](super::fbinfo).
    Memory,
    /// It reports processes.
    Processes,
    /// It puts memory into a file, or takes it out: [`export`](super::export).
    Exports(export::Does),
    /// It isn't made, and the caller gets a status as if it was, for this reason.
    FakedSuccess(&'static str),
    /// It isn't made, for this reason.
    Refused(&'static str),
}

/// What is known of a control; `None` where it isn't.
#[must_use]
pub fn known(command: u32) -> Option<ControlKind> {
    if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == command) {
        return Some(ControlKind::Refused(why));
    }
    if let Some((_, why)) =
        FAKED_SUCCESS.iter().find(|(faked_success, _)| *faked_success == command)
    {
        return Some(ControlKind::FakedSuccess(why));
    }
    match command {
        NV2080_CTRL_CMD_FB_GET_INFO | NV2080_CTRL_CMD_FB_GET_INFO_V2 => {
            return Some(ControlKind::Memory);
        }
        _ if processes::is_one(command) => return Some(ControlKind::Processes),
        _ if export::does(command).is_some() => {
            return export::does(command).map(ControlKind::Exports);
        }
        _ => {}
    }
    if let Some(why) = withheld::why(command) {
        return Some(ControlKind::Refused(why));
    }
    if is_null(command) {
        return Some(ControlKind::Flat);
    }
    if served::is_one(command) {
        let is_flat = flat::FLAT.binary_search(&command).is_ok();
        return Some(if is_flat { ControlKind::Flat } else { ControlKind::Nested });
    }
    if command == UNPUBLISHED || command & RM_GSS_LEGACY_MASK != 0 || command >> 16 == NV2081_BINAPI
    {
        return Some(ControlKind::Opaque);
    }
    None
}

/// How a control is made, with these flags of the call.
///
/// # Errors
///
/// Where it isn't.
pub fn check(release: &Release, command: u32, flags: u32) -> Result<ControlKind, Refusal> {
    let driver = release.version();
    if flags & !LOCK_FLAGS != 0 {
        return Err(Refusal::Control { driver, command, why: "with flags that are not known" });
    }
    match known(command) {
        Some(ControlKind::Refused(why)) => Err(Refusal::Control { driver, command, why }),
        Some(known) => Ok(known),
        None => Err(Refusal::UnknownControl { driver, command }),
    }
}

/// `NVXXXX_CTRL_CMD_NULL` and its like of each class, which do nothing (`_rmapiRmControl`).
fn is_null(command: u32) -> bool {
    command & 0xffff == 0
}

/// The class whose commands all go to the firmware as they are (`binapiControl`, binary_api.c).
const NV2081_BINAPI: u32 = 0x2081;

/// What CUDA asks a device, of one byte; no header has it.
const UNPUBLISHED: u32 = 0x80_028b;

const OF_PEERS: &str = "another driver that takes the memory (GPUDirect RDMA) would keep it past \
                        its charge; it finds none registered, as on a GPU that can't do it";

/// The driver distinguishes users by their effective number alone, and roots of containers share
/// one.
const SWITCHES: &str = "shows what others' processes do on the GPU";

/// Controls that are answered as made, and why: CUDA makes them for memory of its own where the GPU
/// could have peers, whether any program wants that or not.
pub static FAKED_SUCCESS: &[(u32, &str)] =
    &[(NV503C_CTRL_CMD_REGISTER_VIDMEM, OF_PEERS), (NV503C_CTRL_CMD_UNREGISTER_VIDMEM, OF_PEERS)];

/// Controls that are refused though their parameters could be handled, and why. That the
/// others aren't known needs no reason.
pub static REFUSED: &[(u32, &str)] = &[
    (NV0000_CTRL_CMD_OS_UNIX_CREATE_EXPORT_OBJECT_FD, "a descriptor of the caller's"),
    (NV0000_CTRL_CMD_CLIENT_SUBSCRIBE_TO_IMEX_CHANNEL, "a descriptor of the caller's"),
    (NV_SEMAPHORE_SURFACE_CTRL_CMD_REF_MEMORY, "makes handles of memory that are entered nowhere"),
    (NV_SEMAPHORE_SURFACE_CTRL_CMD_REGISTER_WAITER, "a descriptor of the caller's"),
    (NV_SEMAPHORE_SURFACE_CTRL_CMD_UNREGISTER_WAITER, "a descriptor of the caller's"),
    (NV00E0_CTRL_CMD_EXPORT_MEM, "memory would outlive its charge on another node"),
    (NV00E0_CTRL_CMD_IMPORT_MEM, "as its export"),
    (NV00F8_CTRL_CMD_ATTACH_MEM, "memory would outlive its charge in the fabric"),
    (NV00FD_CTRL_CMD_ATTACH_MEM, "memory would outlive its charge in a multicast group"),
    (NV00FD_CTRL_CMD_ATTACH_GPU, "a descriptor of the caller's"),
    (NV00FE_CTRL_CMD_SUBMIT_OPERATIONS, "memory would outlive its charge in a mapper"),
    (NV5080_CTRL_CMD_DEFERRED_API, "makes another control later, which nothing checks"),
    (NV5080_CTRL_CMD_DEFERRED_API_V2, "makes another control later, which nothing checks"),
    (NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID, SWITCHES),
    (NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2, SWITCHES),
    (NV2080_CTRL_CMD_EVENT_VIDEO_BIND_EVTBUF, SWITCHES),
    (NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES, "reports others' processes"),
    (NV2080_CTRL_GPU_GET_NVENC_SW_SESSION_INFO, "reports others' processes"),
    (NV2080_CTRL_GPU_GET_NVENC_SW_SESSION_INFO_V2, "reports others' processes"),
    (NV2080_CTRL_GPU_GET_NVFBC_SW_SESSION_INFO, "reports others' processes"),
    (NV0000_CTRL_CMD_GPUACCT_GET_PROC_ACCOUNTING_INFO, "reports others' processes"),
    (NV0000_CTRL_CMD_GPUACCT_GET_ACCOUNTING_PIDS, "reports others' processes"),
    (NV90CC_CTRL_CMD_HWPM_GET_RESERVATION_INFO, "reports others' processes"),
    (NV0000_CTRL_CMD_NVD_GET_RCERR_RPT, "reports others' processes"),
];

/// A control whose parameters point at arrays.
#[derive(Debug, Clone, Copy)]
pub struct Nested {
    /// The control.
    pub command: u32,
    /// Its struct, as upstream calls it.
    pub name: &'static str,
    /// Bytes of that.
    pub size: usize,
    /// What it points at.
    pub arrays: &'static [Array],
}

/// An array that parameters point at.
#[derive(Debug, Clone, Copy)]
pub struct Array {
    /// The field that points at it, as upstream calls it.
    pub name: &'static str,
    /// Where that field is.
    pub offset: usize,
    /// How long the array is.
    pub length: Length,
    /// Who writes it.
    pub direction: Direction,
}

/// How long an array is.
#[derive(Debug, Clone, Copy)]
pub enum Length {
    /// So many entries as the field of that name, at that offset, says, each of so many bytes.
    Count(&'static str, usize, usize),
    /// The square of that many.
    Square(&'static str, usize, usize),
    /// So many bytes.
    Fixed(usize),
    /// There is none: the field is the kernel's, and 0 of others.
    Nothing,
}

/// Who writes an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The caller.
    In,
    /// The driver, all of it.
    Out,
    /// Both.
    Both,
}

/// An array whose length is at `count`, the field before it.
const fn list(
    name: &'static str,
    offset: usize,
    (count, at): (&'static str, usize),
    entry_bytes: usize,
    direction: Direction,
) -> Array {
    Array { name, offset, length: Length::Count(count, at, entry_bytes), direction }
}

/// A struct of one list, after its length.
const fn one(command: u32, name: &'static str, size: usize, arrays: &'static [Array]) -> Nested {
    Nested { command, name, size, arrays }
}

/// A table of capabilities and its size in bytes.
const CAPS: &[Array] = &[list("capsTbl", 8, ("capsTblSize", 0), 1, Direction::Out)];

const BUILD: Length = Length::Count("sizeOfStrings", 0, 1);
const PEERS: Length = Length::Square("gpuCount", 128, 4);

/// The controls with arrays. Alike in all releases but for `NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS`,
/// whose last field came in 550.40.07.
#[rustfmt::skip]
pub static NESTED: &[Nested] = &[
    one(NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION, "NV0000_CTRL_SYSTEM_GET_BUILD_VERSION_PARAMS", 40, &[
        Array { name: "pDriverVersionBuffer", offset: 8, length: BUILD, direction: Direction::Both },
        Array { name: "pVersionBuffer", offset: 16, length: BUILD, direction: Direction::Both },
        Array { name: "pTitleBuffer", offset: 24, length: BUILD, direction: Direction::Both },
    ]),
    one(NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS, "NV0000_CTRL_SYSTEM_GET_P2P_CAPS_PARAMS", 168, &[
        Array { name: "busPeerIds", offset: 160, length: PEERS, direction: Direction::Out },
    ]),
    one(NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS, "NV0000_CTRL_SYSTEM_GET_P2P_CAPS_PARAMS", 176, &[
        Array { name: "busPeerIds", offset: 160, length: PEERS, direction: Direction::Out },
        Array { name: "busEgmPeerIds", offset: 168, length: PEERS, direction: Direction::Out },
    ]),
    // NV0000_CTRL_GPU_MAX_SZNAME; not written any more.
    one(NV0000_CTRL_CMD_GPU_GET_ID_INFO, "NV0000_CTRL_GPU_GET_ID_INFO_PARAMS", 40, &[
        Array { name: "szName", offset: 16, length: Length::Fixed(128), direction: Direction::Both },
    ]),
    one(NV0041_CTRL_CMD_GET_SURFACE_INFO, "NV0041_CTRL_GET_SURFACE_INFO_PARAMS", 16, &[
        list("surfaceInfoList", 8, ("surfaceInfoListSize", 0), 8, Direction::Both),
    ]),
    one(NV0080_CTRL_CMD_GPU_GET_CLASSLIST, "NV0080_CTRL_GPU_GET_CLASSLIST_PARAMS", 16, &[
        list("classList", 8, ("numClasses", 0), 4, Direction::Both),
    ]),
    one(NV0080_CTRL_CMD_GR_GET_CAPS, "NV0080_CTRL_GR_GET_CAPS_PARAMS", 16, CAPS),
    one(NV0080_CTRL_CMD_GR_GET_INFO, "NV0080_CTRL_GR_GET_INFO_PARAMS", 16, &[
        list("grInfoList", 8, ("grInfoListSize", 0), 8, Direction::Both),
    ]),
    one(NV0080_CTRL_CMD_FB_GET_CAPS, "NV0080_CTRL_FB_GET_CAPS_PARAMS", 16, CAPS),
    one(NV0080_CTRL_CMD_HOST_GET_CAPS, "NV0080_CTRL_HOST_GET_CAPS_PARAMS", 16, CAPS),
    one(NV0080_CTRL_CMD_FIFO_GET_CAPS, "NV0080_CTRL_FIFO_GET_CAPS_PARAMS", 16, CAPS),
    one(NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST, "NV0080_CTRL_FIFO_GET_CHANNELLIST_PARAMS", 24, &[
        list("pChannelHandleList", 8, ("numChannels", 0), 4, Direction::In),
        list("pChannelList", 16, ("numChannels", 0), 4, Direction::Both),
    ]),
    one(NV0080_CTRL_CMD_MSENC_GET_CAPS, "NV0080_CTRL_MSENC_GET_CAPS_PARAMS", 16, CAPS),
    one(NV0080_CTRL_CMD_BSP_GET_CAPS, "NV0080_CTRL_BSP_GET_CAPS_PARAMS", 24, CAPS),
    one(NV2080_CTRL_CMD_GPU_GET_INFO, "NV2080_CTRL_GPU_GET_INFO_PARAMS", 16, &[
        list("gpuInfoList", 8, ("gpuInfoListSize", 0), 8, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_GPU_EXEC_REG_OPS, "NV2080_CTRL_GPU_EXEC_REG_OPS_PARAMS", 48, &[
        list("regOps", 24, ("regOpCount", 20), 32, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_GPU_GET_ENGINES, "NV2080_CTRL_GPU_GET_ENGINES_PARAMS", 16, &[
        list("engineList", 8, ("engineCount", 0), 4, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_GPU_GET_ENGINE_CLASSLIST, "NV2080_CTRL_GPU_GET_ENGINE_CLASSLIST_PARAMS", 16, &[
        list("classList", 8, ("numClasses", 4), 4, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_BIOS_GET_INFO, "NV2080_CTRL_BIOS_GET_INFO_PARAMS", 16, &[
        list("biosInfoList", 8, ("biosInfoListSize", 0), 8, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS", 536, &[
        Array { name: "pRunlistPreemptEvent", offset: 16, length: Length::Nothing, direction: Direction::In },
    ]),
    one(NV2080_CTRL_CMD_GR_GET_INFO, "NV2080_CTRL_GR_GET_INFO_PARAMS", 32, &[
        list("grInfoList", 8, ("grInfoListSize", 0), 8, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_BUS_GET_INFO, "NV2080_CTRL_BUS_GET_INFO_PARAMS", 16, &[
        list("busInfoList", 8, ("busInfoListSize", 0), 8, Direction::Both),
    ]),
    one(NV2080_CTRL_CMD_CE_GET_CAPS, "NV2080_CTRL_CE_GET_CAPS_PARAMS", 16, &[
        list("capsTbl", 8, ("capsTblSize", 4), 1, Direction::Out),
    ]),
    one(NV83DE_CTRL_CMD_DEBUG_READ_MEMORY, "NV83DE_CTRL_DEBUG_READ_MEMORY_PARAMS", 24, &[
        list("buffer", 16, ("length", 4), 1, Direction::Out),
    ]),
    one(NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY, "NV83DE_CTRL_DEBUG_WRITE_MEMORY_PARAMS", 24, &[
        list("buffer", 16, ("length", 4), 1, Direction::In),
    ]),
    one(NVA0BC_CTRL_CMD_NVENC_SW_SESSION_UPDATE_INFO, "NVA0BC_CTRL_NVENC_SW_SESSION_UPDATE_INFO_PARAMS", 32, &[
        list("timestampBuffer", 24, ("timestampBufferSize", 16), 16, Direction::In),
    ]),
];

/// A copy of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where the parameters have its address.
    pub offset: usize,
    /// The caller's address.
    pub address: u64,
    /// Where the copy begins among all copies.
    pub at: usize,
    /// Its bytes.
    pub bytes: usize,
    /// Who writes it.
    pub direction: Direction,
}

/// Copies of all that parameters point at, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pieces {
    all: [Option<Piece>; MAX_PIECES],
    bytes: usize,
}

impl Pieces {
    /// What `params` of a nested control point at.
    ///
    /// # Errors
    ///
    /// Where parameters are of another size than the control's, or an array is longer than
    /// what is copied at most: the driver's own answers.
    pub fn of(command: u32, params: &[u8]) -> Result<Self, Answer> {
        let mut known = NESTED.iter().filter(|nested| nested.command == command);
        let Some(nested) = known.find(|nested| nested.size == params.len()) else {
            return Err(Answer::Status(NV_ERR_INVALID_PARAM_STRUCT));
        };
        let too_much = Answer::Status(NV_ERR_INVALID_ARGUMENT);
        let mut pieces = Pieces::default();
        for (place, array) in pieces.all.iter_mut().zip(nested.arrays) {
            let address = long(params, array.offset).ok_or(too_much)?;
            // What isn't there stays so, whatever its length.
            if address == 0 {
                continue;
            }
            let bytes = array.length.bytes(params).ok_or(too_much)?;
            let (at, direction) = (pieces.bytes, array.direction);
            *place = Some(Piece { offset: array.offset, address, at, bytes, direction });
            // Each begins aligned as the driver's own would.
            let end = at.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(8));
            pieces.bytes = end.filter(|end| *end <= MAX_PIECES_BYTES).ok_or(too_much)?;
        }
        Ok(pieces)
    }

    /// Bytes of all copies.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Each.
    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.all.iter().flatten().copied()
    }

    /// What makes the parameters point at the copies, which begin at `base`.
    pub fn to_copies(&self, base: u64) -> impl Iterator<Item = Patch> + '_ {
        self.iter().map(move |piece| {
            Patch::long(piece.offset, base.wrapping_add(u64::try_from(piece.at).unwrap_or(0)))
        })
    }

    /// What makes them point where they did.
    pub fn back(&self) -> impl Iterator<Item = Patch> + '_ {
        self.iter().map(|piece| Patch::long(piece.offset, piece.address))
    }
}

impl Length {
    /// The array's bytes; `None` where they are too many, or none may be there.
    fn bytes(self, params: &[u8]) -> Option<usize> {
        let count = |at: usize| usize::try_from(word(params, at)?).ok();
        match self {
            Length::Count(_, at, entry_bytes) => count(at)?.checked_mul(entry_bytes),
            Length::Square(_, at, entry_bytes) => {
                count(at)?.checked_mul(count(at)?)?.checked_mul(entry_bytes)
            }
            Length::Fixed(bytes) => Some(bytes),
            Length::Nothing => None,
        }
    }
}

/// Whether eight bytes in a row, anywhere, are an address in one of `ranges`, whose last
/// address is theirs.
#[must_use]
pub fn points_into(bytes: &[u8], ranges: &[(u64, u64)]) -> bool {
    bytes.windows(8).any(|window| {
        let address = window.first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk));
        ranges.iter().any(|(first, last)| (*first..=*last).contains(&address))
    })
}

fn word(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk().map(|field| u32::from_le_bytes(*field))
}

fn long(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes.get(offset..)?.first_chunk().map(|field| u64::from_le_bytes(*field))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn control_tables_are_sorted_and_disjoint() {
        assert!(flat::FLAT.windows(2).all(|pair| pair[0] < pair[1]));
        for nested in NESTED {
            assert!(flat::FLAT.binary_search(&nested.command).is_err(), "{}", nested.name);
            let known_as =
                withheld::why(nested.command).map_or(ControlKind::Nested, ControlKind::Refused);
            assert_eq!(known(nested.command), Some(known_as), "{}", nested.name);
            assert!(nested.arrays.len() <= MAX_PIECES);
            assert!(nested.arrays.iter().all(|array| array.offset + 8 <= nested.size));
        }
        for (command, why) in FAKED_SUCCESS {
            assert_eq!(known(*command), Some(ControlKind::FakedSuccess(why)));
        }
        for (at, (command, why)) in REFUSED.iter().enumerate() {
            assert_eq!(known(*command), Some(ControlKind::Refused(why)));
            assert!(REFUSED[..at].iter().all(|(other, _)| other != command), "{command:#x}");
        }
    }

    #[test]
    fn known_controls_have_their_right_kind() {
        for (command, wanted) in [
            (0, Some(ControlKind::Flat)),
            (NV2080_CTRL_CMD_GPU_GET_GID_INFO, Some(ControlKind::Flat)),
            (NVA06C_CTRL_CMD_SET_TIMESLICE, Some(ControlKind::Flat)),
            (NV2080_CTRL_CMD_FB_GET_INFO, Some(ControlKind::Memory)),
            (NV2080_CTRL_CMD_FB_GET_INFO_V2, Some(ControlKind::Memory)),
            (NV2080_CTRL_CMD_GPU_GET_PIDS, Some(ControlKind::Processes)),
            (0x3d0b, Some(ControlKind::Exports(export::Does::ExportList))),
            (0x3d0c, Some(ControlKind::Exports(export::Does::ImportList))),
            (0x2080_a001, Some(ControlKind::Opaque)),
            (UNPUBLISHED, Some(ControlKind::Opaque)),
            (0x2081_0108, Some(ControlKind::Opaque)),
            // NV2080_CTRL_CMD_BIOS_GET_NBSI, whose array no program needs.
            (0x2080_0803, None),
            (0xdead_0001, None),
            // It was another's number once, which reports processes.
            (0x2080_01a9, None),
        ] {
            assert_eq!(known(command), wanted, "{command:#x}");
        }
    }

    #[test]
    fn a_refusal_says_what_to_report() {
        let release = Release::of("535.161.08".parse().unwrap()).unwrap();
        let of = |command, flags| check(&release, command, flags).unwrap_err().to_string();
        assert_eq!(
            of(0xdead_0001, 0),
            "driver 535.161.08: control 0xdead0001 of class 0xdead is unknown to cgpu: please report"
        );
        assert_eq!(
            of(NV0000_CTRL_CMD_OS_UNIX_CREATE_EXPORT_OBJECT_FD, 0),
            "driver 535.161.08: control 0x00003d0a: a descriptor of the caller's"
        );
        assert!(of(0x2080_0110, 8).ends_with("with flags that are not known"));
        assert_eq!(check(&release, 0x2080_0110, 3), Ok(ControlKind::Flat));
    }

    #[test]
    fn arrays_are_found_and_put_back() {
        let mut params = [0_u8; 40];
        params[0] = 20;
        for (at, address) in [(8, 0x1000_u64), (16, 0), (24, 0x1000)] {
            params[at..at + 8].copy_from_slice(&address.to_le_bytes());
        }
        let before = params;
        let pieces = Pieces::of(NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION, &params).unwrap();
        let places: Vec<_> =
            pieces.iter().map(|piece| (piece.offset, piece.at, piece.bytes)).collect();
        // The same address twice has a copy each; what isn't there has none.
        assert_eq!(places, [(8, 0, 20), (24, 24, 20)]);
        assert_eq!(pieces.bytes(), 48);
        assert!(pieces.to_copies(1 << 40).all(|patch| patch.apply(&mut params)));
        assert_eq!(long(&params, 24), Some((1 << 40) + 24));
        assert_eq!(long(&params, 16), Some(0));
        assert!(pieces.back().all(|patch| patch.apply(&mut params)));
        assert_eq!(params, before);
    }

    /// A control whose list is too long, or whose parameters have another size, is refused as the
    /// driver does.
    #[test]
    fn missized_controls_are_refused_as_by_the_driver() {
        let of = |command, size: usize, count: u32, address: u64| {
            let mut params = vec![0; size];
            if size >= 16 {
                params[..4].copy_from_slice(&count.to_le_bytes());
                params[8..16].copy_from_slice(&address.to_le_bytes());
            }
            Pieces::of(command, &params).map(|pieces| pieces.bytes())
        };
        let list = NV0080_CTRL_CMD_GPU_GET_CLASSLIST;
        let most = u32::try_from(MAX_PIECES_BYTES / 4).unwrap();
        let (size, argument) = (NV_ERR_INVALID_PARAM_STRUCT, NV_ERR_INVALID_ARGUMENT);
        assert_eq!(of(list, 16, most, 1), Ok(MAX_PIECES_BYTES));
        assert_eq!(of(list, 16, 0, 1), Ok(0));
        assert_eq!(of(list, 16, u32::MAX, 0), Ok(0));
        for (count, address) in [(most + 1, 1), (u32::MAX, u64::MAX)] {
            assert_eq!(of(list, 16, count, address), Err(Answer::Status(argument)));
        }
        for bytes in [0, 8, 15, 17, 4096] {
            assert_eq!(of(list, bytes, 1, 1), Err(Answer::Status(size)), "{bytes}");
        }
        let mut params = [0; 536];
        assert!(Pieces::of(NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, &params).is_ok());
        params[16] = 1;
        let refused = Pieces::of(NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, &params);
        assert_eq!(refused, Err(Answer::Status(argument)));
    }

    #[test]
    fn an_address_is_seen_wherever_it_lies() {
        let ranges = [(0x5555_0000_0000, 0x5555_0fff_ffff), (0x7f00_0000_0000, 0x7fff_ffff_ffff)];
        for at in 0..=24 {
            for (address, inside) in
                [(0x5555_0000_0000_u64, true), (0x7fff_ffff_ffff, true), (0x1234, false)]
            {
                let mut bytes = [0; 32];
                bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
                assert_eq!(points_into(&bytes, &ranges), inside, "{at} {address:#x}");
            }
        }
        assert!(!points_into(&[0xff; 7], &ranges));
    }

    proptest! {
        /// What the driver would follow is ours, whatever the caller wrote.
        #[test]
        fn no_address_of_the_callers_is_left(
            which in any::<prop::sample::Index>(),
            base in 0x1000_u64..1 << 46,
            count in prop_oneof![0_u32..600, any::<u32>()],
            seed in proptest::collection::vec(any::<u8>(), 1..600),
        ) {
            let nested = &NESTED[which.index(NESTED.len())];
            let mut params: Vec<u8> = seed.into_iter().cycle().take(nested.size).collect();
            for array in nested.arrays {
                if let Length::Count(_, at, _) | Length::Square(_, at, _) = array.length {
                    params[at..at + 4].copy_from_slice(&count.to_le_bytes());
                }
            }
            let before = params.clone();
            let Ok(pieces) = Pieces::of(nested.command, &params) else { return Ok(()) };
            prop_assert!(pieces.bytes() <= MAX_PIECES_BYTES);
            for patch in pieces.to_copies(base) {
                prop_assert!(patch.apply(&mut params));
            }
            let mut end = 0;
            for array in nested.arrays {
                let address = long(&params, array.offset).unwrap();
                if address == 0 {
                    continue;
                }
                let bytes = array.length.bytes(&params).unwrap();
                let at = usize::try_from(address - base).unwrap();
                prop_assert!(at >= end && at + bytes <= pieces.bytes());
                end = at + bytes;
            }
            for patch in pieces.back() {
                prop_assert!(patch.apply(&mut params));
            }
            prop_assert_eq!(params, before);
        }
    }
}
