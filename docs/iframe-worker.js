// Browsers start no worker from a file on disk, where the search of the theme wants one: a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = () => {
        for (const data of this.waiting.splice(0)) this.send(data);
        this.waiting = null;
      };
      inside.document.body.append(script);
    }

    send(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.send(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
