# ruff: noqa: N802 - the names of functions are the library's
"""NVIDIA's library as ``pynvml`` calls it, with answers from a record.

It has what ``ctypes`` finds in the real one: functions that write where pointers lead
and return the number of an error. So the way from a question to its answer is tested
without a GPU, all but the driver.
"""

import signal

INVALID, NOT_SUPPORTED, INSUFFICIENT, MISMATCH = 2, 3, 7, 25
RECOVERY_FIELD = 230
CORRECTED, UNCORRECTED = 0, 1
SINCE_LOADED, EVER = 0, 1
DRAM, SRAM = 2, 7
COUNTERS = {
    (UNCORRECTED, SINCE_LOADED, SRAM): "sram_uncorrected",
    (UNCORRECTED, EVER, SRAM): "sram_uncorrected_ever",
    (CORRECTED, SINCE_LOADED, SRAM): "sram_corrected",
    (CORRECTED, SINCE_LOADED, DRAM): "dram_corrected",
}
NUMBERS = {
    # Function: question, and the part of its answer.
    "CurrentClocksEventReasons": ("clock_events", None),
    "CurrPcieLinkWidth": ("pcie", "width"),
    "MaxPcieLinkWidth": ("pcie", "max_width"),
    "CurrPcieLinkGeneration": ("pcie", "generation"),
    "MaxPcieLinkGeneration": ("pcie", "max_generation"),
}
TEXTS = {"Name": "titles", "VbiosVersion": "vbios"}


def at(pointer):
    """Return the target of a pointer of ``byref``."""
    return pointer._obj


class RefusalError(Exception):
    """Has the number of an error."""


class FakeLibrary:
    """Exports the functions of NVML that ronde calls.

    Args:
        record: See ``nvml_fake``.
        missing: Functions that this release of the driver does not have.
        fabric_version: The newest form of the question about the fabric that it knows.
        init_error: Number of the error with which it does not start.
        desktop: Processes that draw on the first GPU, and compute there as well.
        gone: By number, GPUs of which not even a handle can be had, and the error.
        hanging: Numbers of GPUs whose questions are never answered.
    """

    def __init__(
        self,
        record,
        missing=(),
        *,
        fabric_version=3,
        init_error=0,
        gone=None,
        desktop=(),
        hanging=(),
    ):
        self._record = record
        self._missing = missing
        self._fabric_version = fabric_version
        self._init_error = init_error
        self._gone = gone or {}
        self._desktop = desktop
        self._hanging = hanging

    def __getattr__(self, name):
        function = None if name in self._missing else self._find(name)
        if function is None:
            raise AttributeError(name)

        def call(*given):
            try:
                function(*given)
            except RefusalError as error:
                return error.args[0]
            return 0

        return call

    def _find(self, name):
        short = name.removeprefix("nvmlDeviceGet")
        if short in NUMBERS:
            return lambda device, out: self._write_number(device, out, *NUMBERS[short])
        if short in TEXTS:
            return lambda device, text, _: self._write(text, device, TEXTS[short])
        # Without its prefix, so that a method is never taken for the function itself.
        method = getattr(type(self), name.removeprefix("nvml"), None)
        return None if method is None else method.__get__(self)

    def _host(self, question):
        return self._checked(self._record["host"][question])

    def _gpu(self, device, question):
        while device.number in self._hanging:
            signal.pause()
        return self._checked(self._record["gpus"][device.number][question])

    @staticmethod
    def _checked(answer):
        if isinstance(answer, dict) and "error" in answer:
            raise RefusalError(answer["error"])
        return answer

    def _write(self, text, device, question):
        text.value = self._gpu(device, question).encode()

    def _write_number(self, device, out, question, part):
        answer = self._gpu(device, question)
        at(out).value = answer if part is None else answer[part]

    def InitWithFlags(self, flags):
        if self._init_error:
            raise RefusalError(self._init_error)

    def Shutdown(self):
        pass

    def DeviceGetCount_v2(self, count):
        at(count).value = self._host("count")

    def SystemGetCudaDriverVersion_v2(self, version):
        major, minor = self._host("cuda_version")
        at(version).value = major * 1000 + minor * 10

    def DeviceGetHandleByIndex_v2(self, index, device):
        if index.value >= len(self._record["gpus"]):
            raise RefusalError(INVALID)
        if index.value in self._gone:
            raise RefusalError(self._gone[index.value])
        at(device).number = index.value

    def DeviceGetPciInfo_v3(self, device, info):
        at(info).busId = f"0000{self._gpu(device, 'bus_ids')}".upper().encode()

    def DeviceGetMemoryInfo_v2(self, device, memory):
        answer = self._gpu(device, "memory_bytes")
        at(memory).total, at(memory).used = answer["total"], answer["used"]
        at(memory).reserved = 600 << 20

    def DeviceValidateInforom(self, device):
        if not self._gpu(device, "has_valid_inforom"):
            raise RefusalError(14)

    def DeviceGetFieldValues(self, device, count, values):
        (field,) = at(values)[: count.value]
        if field.fieldId != RECOVERY_FIELD:
            field.nvmlReturn = INVALID
            return
        try:
            field.value.uiVal = self._gpu(device, "recovery_action")
            field.valueType = 1
        except RefusalError as error:
            field.nvmlReturn = error.args[0]

    def DeviceGetRemappedRows(self, device, *outs):
        rows = self._gpu(device, "remapped_rows")
        names = ("corrected", "uncorrected", "is_pending", "has_failed")
        for name, out in zip(names, outs, strict=True):
            at(out).value = rows[name]

    def DeviceGetMemoryErrorCounter(self, device, kind, since, where, count):
        name = COUNTERS[kind.value, since.value, where.value]
        at(count).value = self._gpu(device, "ecc_errors")[name]

    def DeviceGetMarginTemperature(self, device, info):
        at(info).marginTemperature = self._gpu(device, "margin_celsius")

    def DeviceGetNvLinkState(self, device, link, state):
        links = self._gpu(device, "nvlinks")
        if link >= len(links):
            raise RefusalError(INVALID if links else NOT_SUPPORTED)
        at(state).value = links[link]

    def DeviceGetGpuFabricInfoV(self, device, info):
        fabric, form = self._gpu(device, "fabric"), at(info)
        if form.version >> 24 > self._fabric_version:
            raise RefusalError(MISMATCH)
        form.state, form.status = fabric["state"], fabric["status"]
        form.healthMask = fabric["health"]
        if hasattr(form, "healthSummary"):
            form.healthSummary = fabric["summary"]

    def DeviceGetMigMode(self, device, now, pending):
        at(now).value = at(pending).value = self._gpu(device, "mig")

    def DeviceGetComputeRunningProcesses_v3(self, device, count, processes):
        drawing = self._drawing(device)
        self._list(self._gpu(device, "processes") + drawing, count, processes)

    def DeviceGetGraphicsRunningProcesses_v3(self, device, count, processes):
        self._list(self._drawing(device), count, processes)

    # The forms differ in further fields of a process.

    def _drawing(self, device):
        pids = self._desktop if device.number == 0 else ()
        return [{"pid": pid, "memory_bytes": 5 << 20} for pid in pids]

    def _list(self, found, count, processes):
        if processes is None:
            at(count).value = len(found)
            if found:
                raise RefusalError(INSUFFICIENT)
            return
        at(count).value = len(found)
        for place, process in enumerate(found):
            processes[place].pid = process["pid"]
            size = process["memory_bytes"]
            processes[place].usedGpuMemory = 2**64 - 1 if size is None else size

    def DeviceGetUtilizationRates(self, device, rates):
        at(rates).gpu = self._gpu(device, "busy_percent")
