//! Objects in files: `cliresCtrlCmdOsUnixExport*_IMPL` and `…Import*_IMPL` (os.c), and below
//! them `RmExportObject`, `RmImportObject` (rmobjexportimport.c).
//!
//! A file has places since the first export to it; an object in one is a duplicate that the
//! driver has made for itself, so memory lives while it's there. Closing the file empties it.

use crate::abi::*;
use crate::bytes::Fields;
use crate::driver::Driver;
use crate::escape::Call;
use crate::object::{Allocation, Asker, File, Holder, Object, Status};

/// `deviceInstance` of a file whose objects lie under a client: `NV_MAX_DEVICES`.
const NO_DEVICE: u32 = 32;

/// Bytes of `metadata`.
const METADATA_BYTES: usize = 64;

/// What an open file has: `nv_file_private_t`.
#[derive(Debug)]
pub(crate) struct Exported {
    instance: u32,
    metadata: [u8; METADATA_BYTES],
    /// Where nothing is, there is `None`.
    places: Vec<Option<Duplicate>>,
}

/// An object in a place.
#[derive(Debug, Clone, Copy)]
struct Duplicate {
    class: u32,
    /// The GPU it lies under.
    gpu: Option<usize>,
    /// Its memory, where that is a GPU's.
    memory: Option<u64>,
}

impl Exported {
    /// `_initializeExportObjectFd`.
    fn new(
        driver: &Driver,
        client: u32,
        device: u32,
        places: usize,
        metadata: &[u8],
    ) -> Result<Self, Status> {
        let instance = match device {
            0 => NO_DEVICE,
            device => {
                let objects = driver.clients.get(&client).map(|client| &client.objects);
                let object = objects.and_then(|objects| objects.get(&device));
                let object = object.ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
                if object.class != NV01_DEVICE_0 {
                    return Err(NV_ERR_INVALID_PARAMETER);
                }
                instance(object.gpu)
            }
        };
        let metadata = metadata.try_into().unwrap_or([0; METADATA_BYTES]);
        Ok(Exported { instance, metadata, places: vec![None; places] })
    }

    /// How many places have something.
    pub(crate) fn objects(&self) -> usize {
        self.places.iter().flatten().count()
    }
}

fn instance(gpu: Option<usize>) -> u32 {
    gpu.and_then(|gpu| u32::try_from(gpu).ok()).unwrap_or(NO_DEVICE)
}

impl Driver {
    /// A duplicate of an object for a place of a file: `RmExportObject`.
    fn export(&mut self, client: u32, handle: u32) -> Result<Duplicate, Status> {
        let objects = self.clients.get(&client).map(|client| &client.objects);
        let object: &Object =
            objects.and_then(|objects| objects.get(&handle)).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
        // Whatever isn't memory can't be duplicated, here.
        address_space(object.class)?;
        let duplicate = Duplicate { class: object.class, gpu: object.gpu, memory: object.memory };
        if let Some(memory) = duplicate.memory {
            self.refer(memory, Holder::Kernel, Some(Holder::Object(client, handle)));
        }
        Ok(duplicate)
    }

    /// `RmFreeObjExportHandle`.
    fn unexport(&mut self, duplicate: Option<Duplicate>) {
        if let Some(memory) = duplicate.and_then(|duplicate| duplicate.memory) {
            self.unrefer(memory, Holder::Kernel);
        }
    }

    /// A file that is closed has nothing any more.
    pub(crate) fn forget_exports(&mut self, file: File) {
        let exported = self.exports.remove(&file);
        for duplicate in exported.map(|exported| exported.places).unwrap_or_default() {
            self.unexport(duplicate);
        }
    }
}

/// Where the memory of a class is: `memGetMapAddrSpace`, by the numbers of
/// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`.
fn address_space(class: u32) -> Result<u32, Status> {
    match class {
        NV01_MEMORY_SYSTEM | NV01_MEMORY_SYSTEM_OS_DESCRIPTOR | NV01_MEMORY_DEVICELESS => Ok(1),
        NV01_MEMORY_LOCAL_USER | NV_MEMORY_EXTENDED_USER => Ok(2),
        NV_MEMORY_FABRIC => Ok(4),
        _ => Err(NV_ERR_INVALID_OBJECT),
    }
}

/// The same by the numbers of `NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_*`.
fn import_type(class: u32) -> Result<u8, Status> {
    match address_space(class)? {
        1 => Ok(2),
        2 => Ok(1),
        4 => Ok(3),
        _ => Err(NV_ERR_INVALID_ARGUMENT),
    }
}

/// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`.
pub(crate) fn report_address_space(
    call: &Call<'_>,
    client: u32,
    params: &mut [u8],
) -> Result<(), Status> {
    let driver = call.sim.driver();
    let objects = driver.clients.get(&client).map(|client| &client.objects);
    let object = objects.and_then(|objects| objects.get(&params.u32_at(0)));
    let kind = address_space(object.ok_or(NV_ERR_OBJECT_NOT_FOUND)?.class)?;
    params.set_u32(8, kind);
    Ok(())
}

/// `NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD`: one object, into a file that has none.
pub(crate) fn export(call: &Call<'_>, client: u32, params: &[u8]) -> Result<(), Status> {
    let file = call.descriptor(params.u32_at(16)).ok_or(NV_ERR_INVALID_PARAMETER)?;
    if params.u32_at(0) != 1 || params.u32_at(20) & 1 != 0 {
        return Err(NV_ERR_INVALID_PARAMETER);
    }
    let mut driver = call.sim.driver();
    let duplicate = driver.export(client, params.u32_at(12))?;
    let exported = match driver.exports.contains_key(&file) {
        true => Err(NV_ERR_STATE_IN_USE),
        false => Exported::new(&driver, client, params.u32_at(4), 1, &[]),
    };
    match exported {
        Ok(exported) => {
            let places = vec![Some(duplicate)];
            driver.exports.insert(file, Exported { places, ..exported });
            Ok(())
        }
        Err(status) => {
            driver.unexport(Some(duplicate));
            Err(status)
        }
    }
}

/// `NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD`: all of a list or none; a file that has no
/// places gets them.
pub(crate) fn export_list(call: &Call<'_>, client: u32, params: &[u8]) -> Result<(), Status> {
    const MOST: usize = 512;
    let file = call.descriptor(params.u32_at(0)).ok_or(NV_ERR_INVALID_PARAMETER)?;
    let (count, first) = split(params.u32_at(2124));
    let most = params.u32_at(8) & 0xffff;
    let mut driver = call.sim.driver();
    let exported = driver.exports.get(&file);
    let (instance, places, fresh) = match exported {
        Some(exported) => (exported.instance, exported.places.len(), None),
        None if most == 0 => return Err(NV_ERR_INVALID_PARAMETER),
        None => {
            let metadata = params.get(10..10 + METADATA_BYTES).unwrap_or_default();
            let device = params.u32_at(4);
            let fresh = Exported::new(&driver, client, device, most as usize, metadata)?;
            (fresh.instance, fresh.places.len(), Some(fresh))
        }
    };
    if count > MOST {
        return Err(NV_ERR_INVALID_PARAMETER);
    }
    if first + count > places {
        return Err(NV_ERR_OUT_OF_RANGE);
    }
    let mut duplicates = Vec::new();
    let mut status = NV_OK;
    for number in 0..count {
        let duplicate = match params.u32_at(76 + 4 * number) {
            0 => Ok(None),
            object => driver.export(client, object).map(Some),
        };
        let failed = duplicate.as_ref().err().copied();
        let of_another = |duplicate: &Duplicate| self::instance(duplicate.gpu) != instance;
        let is_strange = matches!(&duplicate, Ok(Some(duplicate)) if of_another(duplicate));
        duplicates.push(duplicate.unwrap_or_default());
        status = failed.unwrap_or(if is_strange { NV_ERR_INVALID_PARAMETER } else { NV_OK });
        if status != NV_OK {
            break;
        }
    }
    if status != NV_OK {
        duplicates.into_iter().for_each(|duplicate| driver.unexport(duplicate));
        return Err(status);
    }
    if let Some(fresh) = fresh {
        driver.exports.insert(file, fresh);
    }
    for (number, duplicate) in duplicates.into_iter().enumerate() {
        let exported = driver.exports.get_mut(&file);
        let place = exported.and_then(|exported| exported.places.get_mut(first + number));
        let before = place.and_then(|place| std::mem::replace(place, duplicate));
        driver.unexport(before);
    }
    Ok(())
}

/// Two numbers of two bytes each.
fn split(word: u32) -> (usize, usize) {
    ((word & 0xffff) as usize, (word >> 16) as usize)
}

/// `NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO`: the GPU of what is in a file, how many
/// places it has, and what the first exporter wrote to that.
pub(crate) fn info(call: &Call<'_>, params: &mut [u8]) -> Result<(), Status> {
    let file = call.descriptor(params.u32_at(0)).ok_or(NV_ERR_INVALID_PARAMETER)?;
    let driver = call.sim.driver();
    let exported = driver.exports.get(&file).ok_or(NV_ERR_INVALID_PARAMETER)?;
    params.set_u32(4, exported.instance);
    // No MIG: `gpuInstanceId`, where a release has it.
    params.set_u32(8, u32::MAX);
    let places = u16::try_from(exported.places.len()).map_err(|_| NV_ERR_INVALID_STATE)?;
    let rest = places.to_le_bytes().into_iter().chain(exported.metadata);
    let place = params.get_mut(call.sim.abi.export_info.1..).unwrap_or_default();
    place.iter_mut().zip(rest).for_each(|(to, from)| *to = from);
    Ok(())
}

/// `RmImportObject`: a duplicate of what is in a place.
fn duplicate(
    driver: &mut Driver,
    asker: &Asker<'_>,
    (client, parent, handle): (u32, u32, u32),
    Duplicate { class, gpu, memory }: Duplicate,
) -> Result<u32, Status> {
    driver.adopt(asker, Allocation { client, parent, handle, class }, gpu, memory)
}

/// `NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD`: what is in the first place.
pub(crate) fn import(
    call: &Call<'_>,
    asker: &Asker<'_>,
    client: u32,
    params: &mut [u8],
) -> Result<(), Status> {
    let file = call.descriptor(params.u32_at(0)).ok_or(NV_ERR_INVALID_PARAMETER)?;
    if params.u32_at(4) != 1 {
        return Err(NV_ERR_INVALID_PARAMETER);
    }
    let mut driver = call.sim.driver();
    let first = driver.exports.get(&file).and_then(|exported| *exported.places.first()?);
    let first = first.ok_or(NV_ERR_INVALID_PARAMETER)?;
    let wanted = (client, params.u32_at(12), params.u32_at(16));
    let handle = duplicate(&mut driver, asker, wanted, first)?;
    params.set_u32(16, handle);
    Ok(())
}

/// `NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD`: what is in a row of places. Where one
/// fails, all that is named before it is freed, also where nothing was imported.
pub(crate) fn import_list(
    call: &Call<'_>,
    asker: &Asker<'_>,
    client: u32,
    params: &mut [u8],
) -> Result<(), Status> {
    const MOST: usize = 128;
    let file = call.descriptor(params.u32_at(0)).ok_or(NV_ERR_INVALID_PARAMETER)?;
    let (count, first) = split(params.u32_at(648));
    let mut driver = call.sim.driver();
    let exported = driver.exports.get(&file).ok_or(NV_ERR_INVALID_PARAMETER)?;
    if count > MOST {
        return Err(NV_ERR_INVALID_PARAMETER);
    }
    let places = exported.places.get(first..first + count).ok_or(NV_ERR_OUT_OF_RANGE)?.to_vec();
    let parent = params.u32_at(4);
    for (number, place) in places.into_iter().enumerate() {
        let (at, kind_at) = (8 + 4 * number, 520 + number);
        let kind = match place {
            None => Ok(0),
            Some(place) => {
                let wanted = (client, parent, params.u32_at(at));
                duplicate(&mut driver, asker, wanted, place).and_then(|handle| {
                    params.set_u32(at, handle);
                    import_type(place.class)
                })
            }
        };
        match kind {
            Ok(kind) => {
                if let Some(place) = params.get_mut(kind_at) {
                    *place = kind;
                }
            }
            Err(status) => {
                for before in (0..number).rev().map(|number| params.u32_at(8 + 4 * number)) {
                    if before != 0 {
                        let _ = driver.free(asker.file, client, before, false);
                    }
                }
                return Err(status);
            }
        }
    }
    Ok(())
}
